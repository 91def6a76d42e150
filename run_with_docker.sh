#!/usr/bin/env bash
# NEXP timed trials on this machine in containers of the image CONT: docker, or Apptainer with CONTAINER_RUNTIME=apptainer.
#   source env.sh; source configs/config_<SYSTEM>_....sh; CONT=mlperf-bert ./run_with_docker.sh
# RUN_NAME=<folder of an earlier run> continues it.
set -euo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/load.sh" supervisor

variables::take "$@"
variables::trainer
variables::load
((DGXNNODES == 1)) || log::die "DGXNNODES=$DGXNNODES: run_with_docker.sh runs on one machine; use run.sub or run_multinode.sh"
[[ -n ${CONT:-} ]] || log::die 'CONT is not set: docker build -t mlperf-bert . and CONT=mlperf-bert; without containers, ./run_local.sh'
supervisor::main local trial
