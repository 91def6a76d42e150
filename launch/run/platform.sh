#!/usr/bin/env bash
# A platform without a scheduler: its machines are given, none can be left out, and nobody starts the run again but its supervisor.
# Sourced by the platforms' supervisor.sh and runner.sh.
export CAN_LEAVE_OUT=0

platform::begin() { variables::name_run; }
# shellcheck disable=SC2034 # for other parts
platform::choose() { nodes=("$(uname -n)"); }
platform::blame() { :; }
platform::blame_by_output() { :; }
platform::why() { echo "interrupted by SIG$1"; }
platform::requeue() { :; }
platform::end() { :; }

runner::ended_by() { :; }
runner::cleanup() {
  container::remove
  node_state::undo
}
