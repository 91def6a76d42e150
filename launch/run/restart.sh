#!/usr/bin/env bash
# Whether a run that failed is started again, and without which nodes: restart.py decides; here is what the supervisor, an attempt and
# the guard of a node ask it. Sourced.

readonly AGAIN=75   # exit status of an attempt that ended because a new start may help (EX_TEMPFAIL)
readonly RESTARTS=3 # at most, without a new checkpoint or a finished trial between them
declare -a blamed=()
declare cause='' gave_up='' restart_text=''
declare -i restart_limit=$RESTARTS can_leave_out=1

restart::ask() { python::host "$REPO_DIR/launch/run/restart.py" "$@"; }
restart::resumes() { restart::ask resumes; }
restart::continues() { restart::ask continues; }
restart::excluded() { restart::ask excluded | grep . || true; }
restart::last() { restart::ask last; }
restart::left_out() { restart::ask left_out "$@"; }

# Would a new start help? Sets cause, restart_limit and blamed (the nodes to leave out).
restart::would_help() {
  local -a plan
  mapfile -t plan < <(restart::ask plan "$can_leave_out")
  cause=${plan[0]:-} restart_limit=${plan[1]:-0} blamed=("${plan[@]:2}")
  [[ $cause ]]
}

# May there be another restart? Otherwise sets gave_up. Argument: restarts without progress that are allowed.
restart::allowed() { gave_up=$(restart::ask allowed "$1"); }

# Notes a restart in restarts.txt; sets restart_text. Arguments: the reason, the nodes to leave out.
restart::note() { restart_text=$(restart::ask note "$@"); }
