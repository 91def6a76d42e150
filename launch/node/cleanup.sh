#!/usr/bin/env bash
# On one node, outside containers: undoes what a run changed there. Usage: cleanup.sh now | guard | leftovers
#   now        GPU clocks (GPU_CLOCKS), staged data (STAGED, a folder) and the container (PYXIS_NAME) of this run, as far as
#              they were changed and are not undone yet
#   guard      the same as soon as its input or the job ends: after scancel, a requeue or the time limit no step could be
#              started to do it
#   leftovers  before a run, with a line for each: containers and staged data that jobs of this user left because the node lost its power, or
#              because Slurm's KillWait cut the removal short; only of jobs that Slurm no longer knows, and of earlier starts
#              of this one
set -uo pipefail
FOLDER=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly FOLDER NODE=${SLURMD_NODENAME:-$(uname -n)}
# pyxis hands enroot none of these, so that a user's ENROOT_DATA_PATH names another folder than the one of the containers.
unset ENROOT_LIBRARY_PATH ENROOT_SYSCONF_PATH ENROOT_RUNTIME_PATH ENROOT_CACHE_PATH ENROOT_DATA_PATH ENROOT_TEMP_PATH

cleanup::containers() { if command -v enroot >/dev/null; then enroot list 2>/dev/null; fi; }

# Removes the containers named on stdin, one a line.
cleanup::remove() {
  local name
  while IFS= read -r name; do enroot remove --force -- "$name" </dev/null >/dev/null; done
}

cleanup::now() {
  trap '' TERM INT HUP
  if [[ ${GPU_CLOCKS:-} ]]; then "$FOLDER/clocks.sh" reset; fi
  if [[ ${STAGED:-} == */bert_* ]]; then rm -rf -- "$STAGED"; fi
  if [[ ${PYXIS_NAME:-} ]]; then
    # pyxis puts a prefix before the name: pyxis_ or, where containers end with their job, pyxis_JOB_; old ones put none.
    cleanup::containers | grep -xE "(pyxis_)?(${SLURM_JOB_ID:-}_)?$PYXIS_NAME" | cleanup::remove
  fi
  exit 0
}

cleanup::guard() {
  trap cleanup::now TERM INT HUP
  cat <&0 >/dev/null & # bash acts on a signal at once only while it waits
  wait "$!"
  cleanup::now
}

# Of the names on stdin, those of jobs that are over. Each ends in bert_JOB_RESTART.
cleanup::of_dead_jobs() {
  local -a names
  local name job restart known
  mapfile -t names < <(grep -E '(^|_|/)bert_[0-9]+_[0-9]+$')
  if ((${#names[@]} == 0)); then return; fi
  # Asked after the names were listed, so that no job may have begun in between; without an answer nothing is removed.
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

# Removes what is named on stdin by a command; where a limit of time ends this, it says so.
cleanup::sweep() {
  local name
  trap 'echo "run: $NODE: $name was not removed in time: the next job goes on" >&2; exit 1' TERM
  while IFS= read -r name; do
    echo "run: $NODE: removing $name, left by a job that is over" >&2
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
