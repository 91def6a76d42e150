#!/usr/bin/env bash
# NEXP timed trials on this machine in containers of the image CONT: docker, or Apptainer with CONTAINER_RUNTIME=apptainer.
#   source env.sh; source configs/config_<SYSTEM>_....sh; CONT=mlperf-bert ./run_with_docker.sh
# RUN_NAME=<folder of an earlier run> continues it.
set -euo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly REPO_DIR
for part in run/trial node/binding run/local; do
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/$part.sh"
done

runner::prepare() {
  ((DGXNNODES == 1)) || log::die "DGXNNODES=$DGXNNODES: run_with_docker.sh runs on one machine; use run.sub or run_multinode.sh"
  container::check
  node_state::stage
  container::create
}

variables::load
[[ -n ${CONT:-} ]] || log::die 'CONT is not set: docker build -t mlperf-bert . and CONT=mlperf-bert; without containers, ./run_local.sh'
[[ ${CONTAINER_RUNTIME:-docker} != pyxis ]] || log::die 'CONTAINER_RUNTIME=pyxis is for Slurm: use docker or apptainer, or run.sub'
container::load docker
trial::main
