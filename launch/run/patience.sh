#!/usr/bin/env bash
# Waits with a limit: a process that hangs, such as a tool of a broken driver, must not keep a run from ending. Sourced.

# Waits for a background job of this shell, at most so many seconds; then ends it and returns 124. Else its exit status.
patience::wait() {
  local -r job=$1 end=$((SECONDS + $2))
  while kill -0 "$job" 2>/dev/null; do
    if ((SECONDS >= end)); then
      patience::end "$job"
      return 124
    fi
    sleep 0.05
  done
  wait "$job"
}

# Ends a job, and its process group if it has its own, without waiting: nothing ends a call that hangs in a driver.
patience::end() {
  local signal
  for signal in TERM KILL; do
    kill "-$signal" -- "-$1" 2>/dev/null || kill "-$signal" "$1" 2>/dev/null || return 0
    sleep 1
  done
}
