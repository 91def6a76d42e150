#!/usr/bin/env bash
# Runs a stage of the preparation, with the Python of launch/run/python.sh.
#
# usage: python.sh STAGE [options]
set -euo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../launch/load.sh" run/python
CONTAINER_RUNTIME=none python::choose
export PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m input_preprocessing "$@"
