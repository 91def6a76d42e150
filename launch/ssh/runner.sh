#!/usr/bin/env bash
# Ranks on several machines over ssh: the functions that trial.sh needs.
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/platform ssh/ssh ssh/trial
declare -a hosts=("${nodes[@]}") container=() command=()

runner::prepare() {
  ssh::command
  container::load ssh
  ssh::check
  container::check
  ssh::check_results
  node_state::stage
  container::create
  MASTER_ADDR=${MASTER_ADDR:-${hosts[0]#*@}}
  export MASTER_ADDR
}

container::exists() { [[ -e $1 ]] || ssh::run "${hosts[0]}" test -e "$1"; }

runner::python() {
  container::arguments
  ssh::run "${hosts[0]}" "${container[@]}" env PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR" "$PYTHON" "$@"
}

runner::trial() {
  # shellcheck disable=SC2016 # $1 is of the inner shell
  MASTER_PORT=$(ssh::run "${hosts[0]}" bash -c 'source "$1/launch/run/port.sh"; port::free' - "$REPO_DIR")
  export MASTER_PORT OMP_NUM_THREADS=${OMP_NUM_THREADS:-}
  container::arguments
  ssh::together
}

# Sets the command that starts the ranks of machine number $1.
runner::ranks() {
  # shellcheck disable=SC2034 # for other parts
  command=("${container[@]}" "$PYTHON" "$REPO_DIR/launch/run/torchrun.py" --nnodes "$DGXNNODES" --node-rank "$1"
    --nproc-per-node "$DGXNGPU" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
    --no-python "$REPO_DIR/launch/run/rank.sh")
}
