#!/usr/bin/env bash
# Whether a run that failed is started again, and without which nodes: restart.py decides; here is what the supervisor, an attempt and
# the guard of a node ask it. Sourced.

export AGAIN=75        # exit status of an attempt that ended because a new start may help (EX_TEMPFAIL)
export CAN_LEAVE_OUT=1 # may a run go on without some of its nodes?

restart::ask() { python::host "$REPO_DIR/launch/run/restart.py" "$@"; }
