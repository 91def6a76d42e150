#!/usr/bin/env bash
# NEXP timed trials on this machine, in the current Python environment: no container, no Slurm.
#   source env.sh; source configs/config_<SYSTEM>_....sh; ./run_local.sh
# PYTHON=/path/to/python chooses the interpreter; default: that of an active environment with PyTorch, else .venv (make setup).
# RUN_NAME=<folder of an earlier run> continues it.
set -euo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/load.sh" supervisor

export CONTAINER_RUNTIME=none
variables::take "$@"
variables::trainer
variables::load
((DGXNNODES == 1)) || log::die "DGXNNODES=$DGXNNODES: run_local.sh runs on one machine; use run.sub or run_multinode.sh"
command -v "$PYTHON" >/dev/null || log::die "PYTHON=$PYTHON: no such interpreter: make setup, or give the path of one"
python::has_torch "$PYTHON" ||
  log::die "PYTHON=$PYTHON: it has no torch: make setup, or activate the environment that has it"
supervisor::main local trial
