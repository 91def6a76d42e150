#!/usr/bin/env bash
# A Slurm job as a platform of supervisor.sh: nodes that fail are left out while enough remain (SPARE_NODES), then the job is
# requeued; a guard on every node.
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/answers slurm/job slurm/requeue
declare guard=''

platform::begin() {
  trap 'supervisor::signalled USR1' USR1 # two minutes before the time limit, see --signal in run.sub
  RUN_NAME=${RUN_NAME:-$(slurm::run_name)}
  variables::name_run
  slurm::check
}

# The first DGXNNODES nodes of the job that are not left out. A step must start on each, and on the spares.
platform::choose() {
  mapfile -t nodes < <(slurm::fit_nodes)
  if ((${#nodes[@]} < DGXNNODES && attempts == 0)); then
    log::warn "too few nodes remain without $(restart::ask excluded | paste -sd' '): using them again"
    mapfile -t nodes < <(slurm::nodes)
  fi
  if ((${#nodes[@]} < DGXNNODES)); then return 1; fi
  slurm::options
  if ! slurm::check_nodes; then
    slurm::leave_out_broken
    ((${#nodes[@]} >= DGXNNODES)) || return 1
  fi
  guard::start
  nodes=("${nodes[@]:0:DGXNNODES}")
}

# Leaves out the nodes on which no step runs, if one runs on others and there are spare nodes; otherwise stops with one line.
slurm::leave_out_broken() {
  local node reason=$step_problem
  local -a fit=() broken=()
  if ((SPARE_NODES)); then
    local -r work=$(mktemp -d)
    for node in "${nodes[@]}"; do
      (slurm::check_nodes "$node" || echo "$step_problem" >"$work/$node") &
    done
    wait
    for node in "${nodes[@]}"; do
      if [[ -e $work/$node ]]; then broken+=("$node") reason=$(<"$work/$node"); else fit+=("$node"); fi
    done
    rm -r -- "$work"
  fi
  if ((${#fit[@]} == 0)); then log::die "$reason"; fi
  nodes=("${fit[@]}")
  if ((${#broken[@]})); then
    restart::ask left_out "$reason" "${broken[@]}"
    log::warn "without ${broken[*]}: $reason"
  fi
}

platform::requeue() { requeue::job "$1"; }

# Guards hold GPUs only with GPU_CLOCKS, which they reset. --no-kill: the others stay when a node is lost.
guard::start() {
  local -a gres=()
  if [[ $guard ]]; then return 0; fi
  if [[ ! ${GPU_CLOCKS:-} ]]; then gres=(--gres=none); fi
  slurm::step "${nodes[@]}"
  set -m
  "${step[@]}" "${gres[@]}" --no-kill --wait=0 --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
    "$REPO_DIR/launch/slurm/guard.sh" >/dev/null 2>&1 &
  guard=$!
  disown "$guard" # if it has to be killed, bash would say so after the last line
  set +m
}

# What attempts did is undone already, if a step could be started for that.
platform::end() {
  if [[ ! $guard ]]; then return 0; fi
  kill -TERM -- "-$guard" 2>/dev/null || true
  child::wait "$guard" "$shutdown_seconds" >/dev/null 2>&1 || true
}
