#!/usr/bin/env bash
# End of the trial loop: exit status and last line give the result, the last line also the reason. That of a run that failed is printed
# by the supervisor (supervisor::finish), once no other attempt follows.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

# State of the loop: failures so far, reason per failed trial, current trial, its process group with its watcher, the signal that ends all.
declare -a failures=() reasons=()
# shellcheck disable=SC2034 # for other parts
declare current='' group='' watcher='' interrupted=''
declare -i shutdown_seconds=20 deadline=0 # that ranks get to end after a signal to this script; when they are over

trial::conclude() {
  local list
  if [[ -e $RUN_DIR/restarts.txt ]]; then restart::ask told >&2; fi
  if ((${#failures[@]})); then
    printf -v list '; %s' "${failures[@]}"
    attempt::end 1 "${#failures[@]} of $NEXP trials failed: ${list#; }"
  fi
  log::info "$(trainer::success): $RUN_DIR"
}

# Ends the attempt with a status and a reason, which the supervisor makes the last line of the run unless it starts again.
attempt::end() {
  record::report last - - - "$2"
  exit "$1"
}

# Ends the attempt if a new one may help, by its records.
attempt::again() {
  platform::blame
  if [[ $(restart::ask plan "$CAN_LEAVE_OUT") ]]; then attempt::end "$AGAIN" "$1"; fi
}

# However this script ends, the last line gives the reason, and what runner::prepare created is removed.
trial::traps() {
  trap trial::clean EXIT
  child::on_signals trial::interrupted
}

# The ranks' watcher, if it is still asleep, would clean up once more, and undo what the next run has done to this machine.
trial::clean() {
  runner::cleanup >/dev/null 2>&1 || true
  if [[ $watcher && $(cat "/proc/$watcher/stat" 2>/dev/null) == *") "?" $$ "* ]]; then kill -KILL "$watcher" 2>/dev/null || true; fi
}

trial::interrupted() {
  local -r signal=$1
  local reason
  IFS=$' \t\n' # the signal may have come within `IFS= read`
  deadline=$((SECONDS + shutdown_seconds))
  interrupted=$signal
  trap '' INT TERM HUP QUIT USR1
  local -r status=$([[ $signal == USR1 ]] && echo 143 || echo $((128 + $(kill -l "$signal"))))
  trial::signal_group "$signal"
  reason=$(platform::why "$signal")
  trial::end_group "$deadline"
  if [[ -n $current ]]; then
    reasons[current]=$reason
    trial::collect "$current" "$status" || true
  fi
  attempt::end "$status" "$reason${RUN_NAME:+; ${CONTINUED_BY-RUN_NAME=$RUN_NAME continues with the missing trials}}"
}

# Prints how ranks that ended with a status ($2) in a folder ($1) ended, the kind of their record; nothing if they ended well.
trial::kind() {
  # A launcher that loses a connection kills the ranks together with the shells that would have left their record.
  if [[ $2 == 137 && ! $interrupted && ! -s $1/status ]]; then
    record::line killed - - - 'the ranks were killed (SIGKILL)' >"$1/status"
  fi
  cut -f 1 -- "$1/status" 2>/dev/null || true
}

# Reports it ($3, of trial $2 in folder $1); for ranks that hung, the missing ones.
trial::blame() {
  if [[ $3 == hung ]]; then
    trial::hang records "$1" "$2" >>"$ATTEMPT_STATUS"
  elif [[ $3 ]]; then
    cat -- "$1/status" >>"$ATTEMPT_STATUS"
  fi
}

# The ranks that did not reach a collective. Arguments: reason or records, the folder, the number of the trial.
trial::hang() { python::host "$REPO_DIR/launch/run/hang.py" "$@" "$DGXNGPU" "${nodes[@]}"; }

# Why a trial failed, in one line. Arguments: its number, the exit status of its ranks, its folder, the kind of their record, the
# file of their output. The first available of: a reason known to this script, the missing ranks, a rank's own, the platform's,
# a full disk; none says where to look.
trial::reason() {
  local -r trial=$1 status=$2 folder=$3 kind=$4 output=${5:-$RUN_DIR/output_$1.txt}
  local reason=${reasons[trial]:-}
  if [[ ! $reason && $kind == hung ]]; then reason=$(trial::hang reason "$folder" "$trial"); fi
  if [[ ! $reason ]]; then reason=$(head -n 1 -- "$folder/error_$trial.txt" 2>/dev/null) || true; fi
  if [[ ! $reason && $status -gt 128 ]]; then reason=$(runner::ended_by "$(kill -l "$status")"); fi
  if [[ ! $reason ]] && ! (head -c 8192 /dev/zero >"$RUN_DIR/.space") 2>/dev/null; then reason="no space left on LOGDIR=$LOGDIR"; fi
  rm -f -- "$RUN_DIR/.space"
  echo "${reason:-no rank gave a reason (exit status $status); ${output##*/} ends with: $(tail -n 1 -- "$output" 2>/dev/null)}"
}
