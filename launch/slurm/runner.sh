#!/usr/bin/env bash
# Ranks in a Slurm job: the functions that trial.sh needs, and a guard on every node (cleanup.sh guard), outside containers, which
# undoes the run's changes at the end. The guards' input closes with this script or by node_guard::end. Sourced by run.sub and
# certify.sub, after job.sh.
# shellcheck disable=SC2034,SC2154 # the state is shared with job.sh, container.sh, ending.sh and variables.sh
declare -a srun=() container=()
readonly SWEEP_PATIENCE=60 GUARD_PATIENCE=300 # seconds: containers and staged data are large

runner::prepare() {
  trap slurm::time_limit_near USR1 # two minutes before the time limit, see --signal in run.sub
  RUN_NAME=${RUN_NAME:-$(slurm::run_name)}
  slurm::check
  container::load pyxis
  container::check
  slurm::srun_command
  MASTER_ADDR=$(slurm::master_address)
  runner::sweep
  node_guard::start
  node_state::stage
  container::create
}

# Removes what dead jobs left on the nodes, a line for each. In the background, so that a signal to this script is handled at
# once and its last line is shown; with a time limit, since a large container takes minutes: the next job continues.
runner::sweep() {
  set -m
  {
    runner::everywhere timeout -k 5 "$SWEEP_PATIENCE" "$REPO_DIR/launch/node/cleanup.sh" leftovers 2>&1 | { grep --line-buffered '^run: ' >&2 || true; }
  } &
  group=$! # trial::interrupted ends it
  set +m
  child::wait "$group" "$((SWEEP_PATIENCE + 30))" || log::warn 'leftovers of dead jobs could not be removed from the nodes'
  group=''
}

runner::nodes() { printf '%s\n' "${nodes[@]}"; }

runner::why() { slurm::why "$1"; }

# At the time limit.
runner::continue() { if restart::resumes; then restart::begin "$1"; fi; }

# After a failure. Arguments: its reason, a file with lines naming the ranks or nodes to blame. A node that Slurm has lost is
# always excluded; a hung or failed one only with SPARE_NODES or RESUME. A rank's own error excludes no node, although the
# other ranks report it as missing.
runner::restart() {
  local -a blamed
  local reason=$1 rank
  read -ra blamed <<<"$(slurm::lost_nodes)"
  if ((${#blamed[@]})); then
    reason='lost by Slurm' # which may have killed the others
    if [[ $1 == *' did not come to '* ]]; then reason+=", ${1%%, DIST_TIMEOUT=*}"; fi
  elif [[ $1 == *' did not come to '* || $1 == 'the start test'* ]] && { ((SPARE_NODES)) || restart::resumes; }; then
    mapfile -t blamed < <({
      sed -n 's/^node //p' "$2"
      sed -n 's/^rank \([0-9]*\)$/\1/p' "$2" | while read -r rank; do echo "${nodes[rank / DGXNGPU]}"; done
    } 2>/dev/null | sort -u)
  fi
  if ((${#blamed[@]} == 1 || (${#blamed[@]} && ${#blamed[@]} < DGXNNODES))); then restart::begin "$reason" "${blamed[@]}"; fi
}

runner::everywhere() { "${srun[@]}" --overlap --ntasks="$DGXNNODES" --ntasks-per-node=1 "$@"; }

# Images and their hooks set some of PyTorch's variables, which would win over exported ones.
runner::python() {
  container::arguments
  "${srun[@]}" --nodes=1 --ntasks=1 "${container[@]}" env RANK=0 LOCAL_RANK=0 WORLD_SIZE="$WORLD_SIZE" \
    LOCAL_WORLD_SIZE="$DGXNGPU" PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" "$@"
}

runner::trial() {
  container::arguments
  exec "${srun[@]}" --ntasks="$WORLD_SIZE" --ntasks-per-node="$DGXNGPU" --kill-on-bad-exit=1 \
    --task-epilog="$REPO_DIR/launch/slurm/lost.sh" "${container[@]}" \
    env -u RANK -u LOCAL_RANK -u WORLD_SIZE MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="$(port::free)" \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-}" "$REPO_DIR/launch/run/rank.sh"
}

runner::cleanup() {
  container::remove
  node_guard::end
}

declare node_guard='' node_guard_input=''

node_guard::needed() { [[ ${PYXIS_NAME:-}${GPU_CLOCKS:-}${STAGED:-} ]]; }

node_guard::start() {
  if ! node_guard::needed; then return 0; fi
  if ! slurm::starts "${srun[@]}" --overlap --nodes=1 --ntasks=1; then
    log::warn 'steps cannot overlap (srun --overlap): after scancel or the time limit, what this job creates on the' \
      'nodes stays there until the next one removes it'
    return 0
  fi
  # A guard takes GPUs only if it resets their clocks.
  local -a options=()
  if [[ ! ${GPU_CLOCKS:-} ]]; then options=(--gres=none); fi
  exec {node_guard_input}> >(exec "${srun[@]}" "${options[@]}" --input=all --overlap --ntasks="$DGXNNODES" \
    --ntasks-per-node=1 "$REPO_DIR/launch/node/cleanup.sh" guard >/dev/null 2>&1)
  node_guard=$!
}

# Ends the guards and waits for them; without guards, a step does their work.
node_guard::end() {
  if [[ $node_guard ]]; then
    exec {node_guard_input}>&-
    child::wait "$node_guard" "$GUARD_PATIENCE" || true
    node_guard=''
  elif node_guard::needed; then
    "${srun[@]}" --ntasks="$DGXNNODES" --ntasks-per-node=1 "$REPO_DIR/launch/node/cleanup.sh" now || true
  fi
}
