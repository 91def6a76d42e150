#!/usr/bin/env bash
# Prepares the whole data set; see --help. Runs on any machine with Python, needs no GPU.
#
# usage: prepare_data.sh --outputdir DIR --packed-data [--skip-download] [--shards N] [--jobs N] [more: --help]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
fi

export PYTHONPATH="$root:$root/implementations${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m input_preprocessing.prepare "$@"
