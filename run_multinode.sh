#!/usr/bin/env bash
# NEXP timed trials on several machines over ssh, without Slurm: hosts[0] runs rank 0.
#   source env.sh; source configs/config_<SYSTEM>_....sh; HOSTS='node1 node2' ./run_multinode.sh
# Or with the names of Samsung's script: PYTHON, DGXSYSTEM (a config's name), INPUT_DIR, EVAL_DIR, CHECKPOINTDIR_PHASE1, NEXP.
# CONT set: in containers of that image (docker, or CONTAINER_RUNTIME=apptainer); empty: with the machines' PYTHON.
set -euo pipefail
# The machines: edit this line, or export HOSTS, or HOSTFILE (a hostfile in DeepSpeed's format). user@host names a user; other
# ssh options go into SSH_OPTIONS.
hosts=()

REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly REPO_DIR
for part in run/trial container/container ssh/hosts ssh/ssh ssh/trial; do
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/$part.sh"
done
declare -a container=() command=()

runner::prepare() {
  ssh::check
  container::check
  ssh::check_results
  node_state::stage
  container::create
  MASTER_ADDR=${MASTER_ADDR:-${hosts[0]#*@}}
  export MASTER_ADDR
}

container::exists() { [[ -e $1 ]] || ssh::run "${hosts[0]}" test -e "$1"; }

runner::everywhere() { ssh::everywhere "$@"; }

runner::python() {
  container::arguments
  ssh::run "${hosts[0]}" "${container[@]}" env PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR" "$PYTHON" "$@"
}

runner::trial() {
  # shellcheck disable=SC2016 # $1 is of the inner shell
  MASTER_PORT=$(ssh::run "${hosts[0]}" bash -c 'source "$1/launch/run/port.sh"; port::free' - "$REPO_DIR")
  export MASTER_PORT OMP_NUM_THREADS=${OMP_NUM_THREADS:-}
  container::arguments
  ssh::together runner::ranks
}

# Sets the command that starts the ranks of machine number $1.
# shellcheck disable=SC2034 # for ssh::together
runner::ranks() {
  command=("${container[@]}" "$PYTHON" "$REPO_DIR/launch/run/torchrun.py" --nnodes "$DGXNNODES" --node-rank "$1"
    --nproc-per-node "$DGXNGPU" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
    --no-python "$REPO_DIR/launch/run/rank.sh")
}

runner::cleanup() {
  container::remove
  node_state::undo
}

hosts::load
variables::default NCCL_TEST 1
variables::load
hosts::check
ssh::command
[[ ${CONTAINER_RUNTIME:-docker} != pyxis ]] || log::die 'CONTAINER_RUNTIME=pyxis is for Slurm: use docker or apptainer, or run.sub'
container::load docker
trial::main
