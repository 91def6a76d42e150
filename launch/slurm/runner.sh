#!/usr/bin/env bash
# Ranks in a Slurm job: the functions that trial.sh needs.
# shellcheck source=launch/slurm/job.sh
source "$REPO_DIR/launch/slurm/job.sh"
declare -a srun=() container=()
readonly SWEEP_SECONDS=60 UNDO_SECONDS=300 # seconds: containers and staged data are large

runner::prepare() {
  trap slurm::time_limit_near USR1 # two minutes before the time limit, see --signal in run.sub
  runner::trial_minutes
  container::load slurm
  container::check
  slurm::options
  slurm::step "${nodes[@]}"
  srun=("${step[@]}" --mpi="$(slurm::mpi_type)")
  MASTER_ADDR=$(slurm::master_address)
  runner::sweep
  node_state::stage
  container::create
}

# Sets a trial's part of the job's time: WALLTIME may be longer than what configs derive, or of fewer trials if NEXP was exported later.
runner::trial_minutes() {
  if [[ ! ${WALLTIME_RUNANDTIME:-} ]]; then return 0; fi
  local -r part=$(((${WALLTIME:-0} - START_MINUTES) / NEXP))
  trial_minutes=$((WALLTIME_RUNANDTIME + START_MINUTES))
  if ((part > trial_minutes)); then trial_minutes=$part; fi
}

# Removes what dead jobs left on the nodes, a line for each. In the background, so that a signal to this script is handled at
# once and its last line is shown; with a time limit, since a large container takes minutes: the next job continues.
runner::sweep() {
  set -m
  {
    runner::everywhere timeout -k 5 "$SWEEP_SECONDS" "$REPO_DIR/launch/node/cleanup.sh" leftovers 2>&1 |
      { grep --line-buffered '^run: ' >&2 || true; }
  } &
  group=$! # trial::interrupted ends it
  set +m
  child::wait "$group" "$((SWEEP_SECONDS + 30))" || log::warn 'leftovers of dead jobs could not be removed from the nodes'
  group=''
}

runner::ended_by() { slurm::ask cause "$1" "${nodes[@]}"; }

runner::everywhere() { "${srun[@]}" --ntasks="$DGXNNODES" --ntasks-per-node=1 "$@"; }

# Images and their hooks set some of PyTorch's variables, which would win over exported ones.
runner::python() {
  container::arguments
  "${srun[@]}" --nodes=1 --ntasks=1 "${container[@]}" env RANK=0 LOCAL_RANK=0 WORLD_SIZE="$WORLD_SIZE" \
    LOCAL_WORLD_SIZE="$DGXNGPU" PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" "$@"
}

runner::trial() {
  container::arguments
  exec "${srun[@]}" --ntasks="$WORLD_SIZE" --ntasks-per-node="$DGXNGPU" --kill-on-bad-exit=1 "${container[@]}" \
    env -u RANK -u LOCAL_RANK -u WORLD_SIZE MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="$(port::free)" \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-}" "$REPO_DIR/launch/run/rank.sh"
}

# Undoes what this attempt did to its nodes. When Slurm ends the job no step can be started, and the guards do it. Nodes that are
# lost or that failed may not answer, and are not waited for as long.
runner::cleanup() {
  local -a fit failed
  if [[ $interrupted && $interrupted != USR1 ]] || ((${#srun[@]} == 0)); then return 0; fi
  container::remove
  if [[ ! ${CONTAINER_NAME:-}${GPU_CLOCKS:-}${STAGED:-} ]]; then return 0; fi
  platform::blame
  mapfile -t failed < <(awk -F '\t' '$1 ~ /^(lost|missing|unfit|broken)$/ { print $3 }' "$ATTEMPT_STATUS" | sort -u)
  mapfile -t fit < <(printf '%s\n' "${nodes[@]}" | grep -vxF -f <(printf '%s\n' "${failed[@]:-}"))
  if ((${#failed[@]})); then runner::undo 30 "${failed[@]}" & fi
  if ((${#fit[@]})); then runner::undo "$UNDO_SECONDS" "${fit[@]}"; fi
  wait
}

# Arguments: seconds, nodes.
runner::undo() {
  slurm::step "${@:2}"
  timeout -k 5 "$1" "${step[@]}" --ntasks="$(($# - 1))" --ntasks-per-node=1 "$REPO_DIR/launch/node/cleanup.sh" now || true
}
