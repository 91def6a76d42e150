#!/usr/bin/env bash
# The supervisor of a run: chooses nodes, starts an attempt on them (attempt.sh, a process of its own), reads the records of how it
# ended, and decides: end, start again on the same or on other nodes, or have the job requeued. Sourced by the run scripts.
# A platform is a folder of launch/ (local, ssh, slurm) with runner.sh, which an attempt sources, and supervisor.sh with:
#   platform::begin          before the first attempt
#   platform::choose         sets nodes, those of the next attempt; fails if too few are fit
#   platform::blame          after a failed attempt: adds records of nodes that are lost or do not answer
#   platform::blame_by_output    after ranks that failed, whose output is on stdin: the same of nodes that their launcher gave up
#   platform::why SIGNAL     why this script got a signal, in words
#   platform::requeue TEXT   has the job started again elsewhere, and does not return unless that is impossible
#   platform::end            before this script exits
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/log run/variables run/child run/record run/restart container/container
declare -a nodes=()
declare attempt='' signalled=''
declare -i attempts=0 status=0

# Runs the work (trial or certify) on a platform, and exits. Arguments: platform, work.
supervisor::main() {
  readonly PLATFORM=$1 WORK=$2
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/$PLATFORM/supervisor.sh"
  container::choose "$PLATFORM"
  python::require_host
  SUPERVISOR=$(uname -n)_$$
  SUPERVISOR_BEGAN=$(date +%s)
  export SUPERVISOR SUPERVISOR_BEGAN # whose restarts are counted, where there is no job; by this machine's clock
  log::info "Python: $PYTHON$([[ $CONTAINER_RUNTIME == none ]] || echo " of the image $CONT")"
  trap supervisor::clean EXIT
  child::on_signals supervisor::signalled
  ATTEMPT_STATUS=$(mktemp) || log::die "mktemp cannot make a file: make room in /tmp, or export TMPDIR"
  export ATTEMPT_STATUS
  platform::begin
  if ! platform::choose; then supervisor::finish 1 "too few nodes are left: ${#nodes[@]} of $DGXNNODES"; fi
  while :; do
    supervisor::attempt
    if ((status == 0)); then exit 0; fi
    supervisor::restart
  done
}

# The attempt ends itself, says why, and is waited for. Before the first one there is nothing to end.
supervisor::signalled() {
  signalled=$1
  if [[ $attempt ]]; then
    kill -"$1" "$attempt" 2>/dev/null || true
  else
    supervisor::finish "$((128 + $(kill -l "$1")))" "$(platform::why "$1")"
  fi
}

supervisor::clean() {
  trap '' INT TERM HUP QUIT USR1
  platform::end
  rm -f -- "$ATTEMPT_STATUS"
}

supervisor::attempt() {
  : >"$ATTEMPT_STATUS"
  export ATTEMPT=$attempts
  # Of its containers and staged data, by which those that are left of it are found.
  export ATTEMPT_NAME=bert_${SLURM_JOB_ID:-$$}_${SLURM_RESTART_COUNT:-0}
  if ((attempts)); then ATTEMPT_NAME+=_$attempts; fi
  attempts+=1
  status=0
  set -m # its own process group, in which INT is not ignored
  "$REPO_DIR/launch/attempt.sh" "$PLATFORM" "$WORK" "${nodes[@]}" &
  attempt=$!
  child::bind "$attempt" "$$" 60
  set +m
  if [[ $signalled ]]; then kill -"$signalled" "$attempt" 2>/dev/null || true; fi
  wait "$attempt" || status=$?
  while kill -0 "$attempt" 2>/dev/null; do
    status=0
    wait "$attempt" || status=$?
  done
  attempt=''
}

# After an attempt that failed: returns if another one is to be started, otherwise exits.
supervisor::restart() {
  local -r last=$(restart::ask last)
  local -a plan
  local text
  if [[ $signalled == USR1 ]] && restart::ask resumes; then
    text=$(restart::ask allowed) || supervisor::finish "$status" "$text; $last"
    platform::requeue "$(restart::ask note "$(platform::why USR1)")"
  elif ((status < 128)); then
    platform::blame
    mapfile -t plan < <(restart::ask plan "$CAN_LEAVE_OUT") # cause, restarts allowed, nodes to leave out
    if ((${#plan[@]})); then
      text=$(restart::ask allowed "${plan[1]}") || supervisor::finish 1 "$text${last:+; $last}"
      text=$(restart::ask note "${plan[0]}" "${plan[@]:2}")
      if platform::choose; then
        log::warn "restarts${nodes[*]:+ on ${nodes[*]}}, $text"
        return 0
      fi
      platform::requeue "$text"
    fi
  fi
  supervisor::finish "$((status == AGAIN ? 1 : status))" "$last"
}

# The last line of the run; empty if the attempt has printed it.
supervisor::finish() {
  if ((status > 128)) && [[ ! $2 && ! $signalled ]]; then
    log::error "the attempt was killed by SIG$(kill -l "$status"); RUN_NAME=${RUN_NAME:-} continues with the missing trials"
  elif [[ $2 ]]; then
    log::error "$2"
  fi
  exit "$1"
}
