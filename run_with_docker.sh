#!/usr/bin/env bash
# NEXP timed trials on this machine in containers of the image CONT: docker, or Apptainer with CONTAINER_RUNTIME=apptainer.
#   source env.sh; source configs/config_<SYSTEM>_....sh; CONT=mlperf-bert ./run_with_docker.sh
# RUN_NAME=<folder of an earlier run> continues it.
set -euo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly REPO_DIR
for part in run/trial node/binding container/container; do
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/$part.sh"
done
declare -a container=()

runner::prepare() {
  ((DGXNNODES == 1)) || log::die "DGXNNODES=$DGXNNODES: run_with_docker.sh runs on one machine; use run.sub or run_multinode.sh"
  container::check
  node_state::stage
  container::create
}

runner::everywhere() { "$@"; }

runner::python() {
  container::arguments
  "${container[@]}" env PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR" "$PYTHON" "$@"
}

runner::trial() {
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(binding::threads "$DGXNGPU")}
  # On one machine gloo needs no host name; a wrong one in /etc/hosts would hang it.
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
  container::arguments
  exec "${container[@]}" "$PYTHON" "$REPO_DIR/launch/run/torchrun.py" \
    --nnodes 1 --nproc-per-node "$DGXNGPU" --master-addr 127.0.0.1 --master-port "$(port::free)" \
    --no-python "$REPO_DIR/launch/run/rank.sh"
}

runner::cleanup() {
  container::remove
  node_state::undo
}

variables::load
[[ -n ${CONT:-} ]] || log::die 'CONT is not set: docker build -t mlperf-bert . and CONT=mlperf-bert; without containers, ./run_local.sh'
[[ ${CONTAINER_RUNTIME:-docker} != pyxis ]] || log::die 'CONTAINER_RUNTIME=pyxis is for Slurm: use docker or apptainer, or run.sub'
container::load docker
trial::main
