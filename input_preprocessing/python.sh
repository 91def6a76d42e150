#!/usr/bin/env bash
# Runs a stage of the preparation with the checkout's Python environment, or with $PYTHON.
#
# usage: python.sh STAGE [options]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
fi

export PYTHONPATH="$root:$root/implementations${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m input_preprocessing "$@"
