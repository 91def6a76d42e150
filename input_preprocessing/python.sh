#!/usr/bin/env bash
# Runs a stage of the preparation, with the Python of launch/run/python.sh.
#
# usage: python.sh STAGE [options]
set -euo pipefail

REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
readonly REPO_DIR
# shellcheck source=launch/run/python.sh
source "$REPO_DIR/launch/run/python.sh"

CONTAINER_RUNTIME=none python::choose
export PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m input_preprocessing "$@"
