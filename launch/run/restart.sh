#!/usr/bin/env bash
# Whether a run that failed is started again, and without which nodes: restart.py decides; here is what the supervisor, an attempt and
# the guard of a node ask it. Sourced.

export AGAIN=75        # exit status of an attempt that ended because a new start may help (EX_TEMPFAIL)
export RESTARTS=3      # at most, without a new checkpoint or a finished trial between them
export CAN_LEAVE_OUT=1 # may a run go on without some of its nodes?

restart::ask() { python::host "$REPO_DIR/launch/run/restart.py" "$@"; }
restart::resumes() { restart::ask resumes; }
restart::continues() { restart::ask continues; }
restart::excluded() { restart::ask excluded | grep . || true; }
restart::last() { restart::ask last; }
restart::left_out() { restart::ask left_out "$@"; }

# Would a new start help? Prints the cause, the restarts allowed, and the nodes to leave out, a line each; nothing if not.
restart::plan() { restart::ask plan "$CAN_LEAVE_OUT" | grep . || true; }

# May there be another restart? Otherwise prints why not. Argument: restarts without progress that are allowed.
restart::allowed() { restart::ask allowed "$1"; }

# Notes a restart in restarts.txt; prints it in words. Arguments: the reason, the nodes to leave out.
restart::note() { restart::ask note "$@"; }
