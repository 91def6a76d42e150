#!/usr/bin/env bash
# Processes that end with the script that started them, whatever ends it, or after a time. Sourced.

declare child='' child_ended=''

# Ends a background job, and its process group if it has its own, once its starter is gone: killed outright, that could not.
# Arguments: the job; the process that it shall not outlive (this script); what to run then (nothing).
child::bind() {
  local -r job=$1 starter=${2:-$$}
  (
    set +e
    trap '' TERM INT HUP QUIT USR1
    exec </dev/null >/dev/null 2>&1 3>&- {never}<> <(:) # waits without a process a second beside timed ranks
    if [[ ${lock_file:-} ]]; then exec {lock_file}>&-; fi
    while child::lives "$job" && child::lives "$starter"; do read -rt 1 -u "$never"; done
    if child::lives "$starter"; then exit; fi
    child::stop "$job" 20
    "${@:3}"
  ) &
}

# Asks a job to end, and its process group if it has its own, and kills it after so many seconds. Does not wait for that: a call
# that hangs in a driver ends for nobody.
child::stop() {
  local target=$1 i
  if kill -0 -- "-$1" 2>/dev/null; then target=-$1; fi
  kill -TERM -- "$target" 2>/dev/null || return 0
  for ((i = 0; i < 10 * $2; i++)); do
    child::lives "$target" || return 0
    sleep 0.1
  done
  kill -KILL -- "$target" 2>/dev/null || true
}

# Waits for a background job of this shell, at most so many seconds; then ends it, within some more (1), and returns 124. Else
# its exit status.
child::wait() {
  local -r end=$((SECONDS + $2))
  while kill -0 "$1" 2>/dev/null; do
    if ((SECONDS >= end)); then
      child::stop "$1" "${3:-1}"
      return 124
    fi
    sleep 0.05
  done
  wait "$1"
}

# Does a process live, or of -N one of the group N? Not one that has ended and that nobody asks for: the first process of a
# container, which adopts orphans (srun leaves one), may never do so.
child::lives() {
  local line
  if [[ $1 == -* ]]; then
    kill -0 -- "$1" 2>/dev/null && awk -v group="${1#-}" '{ sub(/.*\) /, "") } $3 == group && !/^[ZX]/ { found = 1; exit }
      END { exit !found }' < <(cat /proc/[0-9]*/stat 2>/dev/null)
  else
    read -r line <"/proc/$1/stat" && [[ $line != *') Z '* ]]
  fi
}

# Runs a command, which ends with this script: to be used with `trap child::end TERM INT HUP QUIT`. Exit status: the
# command's, and never 0 after a signal.
child::run() {
  local status=0
  "$@" &
  child=$!
  child::bind "$child"
  if [[ $child_ended ]]; then child::end; fi # a signal came before there was a command to end
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do wait "$child" || status=$?; done
  child=''
  if [[ $child_ended ]] && ((status == 0)); then status=143; fi
  return "$status"
}

child::end() {
  child_ended=1
  if [[ $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi
}
