#!/usr/bin/env bash
# All ranks of one run as a process group of their own. Sourced by trial.sh.
# shellcheck disable=SC2154 # group and lock_file are of ending.sh and variables.sh

declare watch='' # process group of the clock of a time limit

# Runs the ranks as a job of their own, so that a signal to this script reaches it at once and ends them all.
# Arguments: their folder, the file of their output, the seconds after which they are ended (0: never).
trial::ranks() {
  local -r folder=$1 output=$2 limit=$3
  local status=0
  set -m
  {
    exec {lock_file}>&-
    RUN_DIR=$folder runner::trial 2>&1 | (
      trap '' INT TERM HUP
      exec tee -a -- "$output"
    )
  } &
  group=$!
  if ((limit)); then
    (exec >/dev/null 2>&1 && sleep "$limit" && kill -TERM -- "-$group") &
    watch=$!
  fi
  set +m
  wait "$group" || status=$?
  group=''
  trial::end_watch
  return "$status"
}

trial::end_watch() {
  if [[ $watch ]]; then kill -- "-$watch" 2>/dev/null || true; fi
  watch=''
}

# Ends the ranks of the running trial: politely, then after 20 s for certain.
trial::end_group() {
  local i
  trial::end_watch
  kill -TERM -- "-$group" 2>/dev/null || return 0
  for ((i = 0; i < 200; i++)); do
    kill -0 -- "-$group" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL -- "-$group" 2>/dev/null || true
}
