#!/usr/bin/env bash
# Child processes that end with the script that started them, however it ends, or after a time limit. Sourced.

declare child='' child_ended='' child_starter=''

# Ends a background job, with its process group if it has its own, once its starter is gone, which works even if that was
# killed. Arguments: the job; the process that it must not outlive (this script); the seconds that it gets to end; a command to run
# afterwards (none).
child::bind() {
  local -r job=$1 starter=${2:-$$} seconds=${3:-20}
  (
    child::become_watcher
    while child::lives "$job" && child::lives "$starter"; do child::pause; done
    if child::lives "$starter"; then exit; fi
    child::stop "$job" "$seconds"
    "${@:4}"
  ) &
}

# Makes this subshell, which looks at others once a second, outlive signals and hold no file of the script that started it.
child::become_watcher() {
  set +e
  trap '' TERM INT HUP QUIT USR1
  exec </dev/null >/dev/null 2>&1 3>&- {never}<> <(:)
  if [[ ${lock_file:-} ]]; then exec {lock_file}>&-; fi
}

# A second, without starting a process next to timed ranks.
child::pause() { read -rt 1 -u "$never"; }

# Terminates a job ($1), with its process group if it has its own, and kills it after $2 seconds. Does not wait for the kill: a
# process that hangs in a driver call cannot be killed.
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

# Waits for a background job ($1) of this shell for at most $2 seconds; then ends it within $3 (1) seconds and returns 124.
# Otherwise returns its exit status.
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

# Is a process, or for -N any process of group N, alive? Zombies do not count: the first process of a container, which adopts
# orphans (srun leaves one), may never reap them.
child::lives() {
  local line
  if [[ $1 == -* ]]; then
    kill -0 -- "$1" 2>/dev/null && awk -v group="${1#-}" '{ sub(/.*\) /, "") } $3 == group && !/^[ZX]/ { found = 1; exit }
      END { exit !found }' < <(cat /proc/[0-9]*/stat 2>/dev/null)
  else
    read -r line <"/proc/$1/stat" && [[ $line != *') Z '* ]]
  fi
}

# Runs a command that ends with this script, or with the process child_starter; use with `trap child::end TERM INT HUP QUIT`. The trap
# only passes the signal on: a wait inside it, nested in the one below, may never end (bash 5.2). Exit status: the command's, but never 0
# after a signal.
child::run() {
  local status=0
  "$@" &
  child=$!
  child::bind "$child" "${child_starter:-$$}"
  if [[ $child_ended ]]; then child::end; fi # the signal came before the command had started
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do wait "$child" || status=$?; done
  child=''
  if [[ $child_ended ]] && ((status == 0)); then status=143; fi
  return "$status"
}

# Calls a function with the name of each signal that ends a script.
child::on_signals() {
  local signal
  # shellcheck disable=SC2064 # expand now
  for signal in HUP INT QUIT TERM; do trap "$1 $signal" "$signal"; done
}

child::end() {
  child_ended=1
  if [[ $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi
}
