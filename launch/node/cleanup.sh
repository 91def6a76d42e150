#!/usr/bin/env bash
# On one node, outside containers: undoes a run's changes to the node. Usage: cleanup.sh now | leftovers
#   now        resets GPU clocks (GPU_CLOCKS), removes staged data (STAGED, a folder) and containers of this start of the job, if
#              not done yet
#   leftovers  before a run: removes containers and staged data, a line each, that jobs of this user left after a power loss or
#              because Slurm's KillWait cut the removal short; only of jobs that Slurm no longer knows, and of earlier starts of
#              this one
set -uo pipefail
readonly NODE=${SLURMD_NODENAME:-$(uname -n)}
# shellcheck source=launch/load.sh
source "${BASH_SOURCE[0]%/*}/../load.sh" run/log run/python

# Runs a function of this file for each runtime whose containers may outlive a run, in a shell that has the runtime's functions.
cleanup::each_runtime() {
  local file
  for file in "$REPO_DIR"/launch/container/runtimes/*.sh; do
    # shellcheck source=/dev/null
    (source "$file" && declare -F container::on_node_list >/dev/null && "$@")
  done
}

# Removes this user's containers whose names end in this extended regular expression.
cleanup::containers() {
  local name
  while IFS= read -r name; do
    container::on_node_remove "$name" </dev/null >/dev/null
  done < <(container::on_node_list 2>/dev/null | grep -E "(^|_)$1\$")
}

# Removes a folder that stage.sh made, if nobody else uses it.
cleanup::made() {
  if [[ $(ls -A -- "$1" 2>/dev/null) == .made_for_staging ]]; then rm -f -- "$1/.made_for_staging" && rmdir -- "$1"; fi
}

cleanup::now() {
  trap '' TERM INT HUP
  if [[ ${GPU_CLOCKS:-} ]]; then "$REPO_DIR/launch/node/clocks.sh" reset; fi
  if [[ ${STAGED:-} == */bert_* ]]; then
    rm -rf -- "$STAGED"
    cleanup::made "${STAGED%/*}"
  fi
  if [[ ! ${SLURM_JOB_ID:-} ]]; then return 0; fi
  # Of every attempt: a guard lasts longer than one.
  local -r mark=bert_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
  if [[ ${STAGE_DIR:-} ]]; then
    rm -rf -- "${STAGE_DIR:?}/$mark" "${STAGE_DIR:?}/${mark}"_*
    cleanup::made "${STAGE_DIR%/}"
  fi
  cleanup::each_runtime cleanup::containers "$mark(_[0-9]+)?"
}

# Filters the names on stdin: those of jobs that have ended, and of earlier starts and attempts of this one.
cleanup::of_dead_jobs() { python::host "$REPO_DIR/launch/slurm/job.py" 20 "${SLURM_JOB_ID:-}" dead; }

# Removes what is named on stdin with a command; reports if a time limit interrupts it.
cleanup::sweep() {
  local name
  trap 'echo "run: $NODE: $name was not removed in time: the next job continues" >&2; exit 1' TERM
  while IFS= read -r name; do
    echo "run: $NODE: removing $name, left by a job that has ended" >&2
    "$@" "$name" </dev/null >/dev/null
  done
}

cleanup::dead_containers() {
  container::on_node_list 2>/dev/null | cleanup::of_dead_jobs | cleanup::sweep container::on_node_remove
}

cleanup::leftovers() {
  local late=''
  trap late=1 TERM
  cleanup::each_runtime cleanup::dead_containers
  if [[ $late ]]; then exit 1; fi
  if [[ ${STAGE_DIR:-} ]]; then
    find "$STAGE_DIR" -mindepth 1 -maxdepth 1 -type d -user "$(id -u)" -name 'bert_*' 2>/dev/null |
      cleanup::of_dead_jobs | cleanup::sweep rm -rf --
  fi
  exit 0
}

"cleanup::${1:?now or leftovers}"
