#!/usr/bin/env bash
# On one node, outside containers: undoes a run's changes to the node. Usage: cleanup.sh now | guard | leftovers
#   now        resets GPU clocks (GPU_CLOCKS), removes staged data (STAGED, a folder) and the container (PYXIS_NAME) of this run,
#              if not done yet
#   guard      the same as soon as its input or the job ends: after scancel, a requeue or the time limit no step can be started
#              for it
#   leftovers  before a run: removes containers and staged data, a line each, that jobs of this user left after a power loss or
#              because Slurm's KillWait cut the removal short; only of jobs that Slurm no longer knows, and of earlier starts of
#              this one
set -uo pipefail
FOLDER=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly FOLDER NODE=${SLURMD_NODENAME:-$(uname -n)}
# pyxis passes none of these to enroot, so a user's ENROOT_DATA_PATH is not the folder of the containers.
unset ENROOT_LIBRARY_PATH ENROOT_SYSCONF_PATH ENROOT_RUNTIME_PATH ENROOT_CACHE_PATH ENROOT_DATA_PATH ENROOT_TEMP_PATH

cleanup::containers() { if command -v enroot >/dev/null; then enroot list 2>/dev/null; fi; }

# Removes the containers named on stdin, one per line.
cleanup::remove() {
  local name
  while IFS= read -r name; do enroot remove --force -- "$name" </dev/null >/dev/null; done
}

cleanup::now() {
  trap '' TERM INT HUP
  if [[ ${GPU_CLOCKS:-} ]]; then "$FOLDER/clocks.sh" reset; fi
  if [[ ${STAGED:-} == */bert_* ]]; then rm -rf -- "$STAGED"; fi
  if [[ ${PYXIS_NAME:-} ]]; then
    # pyxis prefixes the name with pyxis_ or, if containers end with their job, with pyxis_JOB_; old versions add nothing.
    cleanup::containers | grep -xE "(pyxis_)?(${SLURM_JOB_ID:-}_)?$PYXIS_NAME" | cleanup::remove
  fi
  exit 0
}

cleanup::guard() {
  trap cleanup::now TERM INT HUP
  cat <&0 >/dev/null & # bash handles a signal at once only in wait
  wait "$!"
  cleanup::now
}

# Filters the names on stdin, each ending in bert_JOB_RESTART, for jobs that have ended.
cleanup::of_dead_jobs() {
  local -a names
  local name job restart known
  mapfile -t names < <(grep -E '(^|_|/)bert_[0-9]+_[0-9]+$')
  if ((${#names[@]} == 0)); then return; fi
  # After listing the names, so that no job can start in between; without an answer nothing is removed.
  known=$(squeue --noheader --format=%A 2>/dev/null) || return
  for name in "${names[@]}"; do
    IFS=_ read -r job restart <<<"${name##*bert_}"
    if [[ $job == "${SLURM_JOB_ID:-}" ]]; then
      if ((restart < ${SLURM_RESTART_COUNT:-0})); then echo "$name"; fi
    elif ! grep -qxF -- "$job" <<<"$known"; then
      echo "$name"
    fi
  done
}

# Removes what is named on stdin with a command; reports if a time limit interrupts it.
cleanup::sweep() {
  local name
  trap 'echo "run: $NODE: $name was not removed in time: the next job continues" >&2; exit 1' TERM
  while IFS= read -r name; do
    echo "run: $NODE: removing $name, left by a job that has ended" >&2
    "$@" "$name" </dev/null >/dev/null
  done
}

cleanup::leftovers() {
  local late=''
  trap late=1 TERM
  cleanup::containers | cleanup::of_dead_jobs | cleanup::sweep enroot remove --force --
  if [[ $late ]]; then exit 1; fi
  if [[ ${STAGE_DIR:-} ]]; then
    find "$STAGE_DIR" -mindepth 1 -maxdepth 1 -type d -user "$(id -u)" -name 'bert_*' 2>/dev/null |
      cleanup::of_dead_jobs | cleanup::sweep rm -rf --
  fi
  exit 0
}

case ${1:-} in
  now | guard | leftovers) "cleanup::$1" ;;
  *) echo 'usage: cleanup.sh now | guard | leftovers' >&2 && exit 2 ;;
esac
