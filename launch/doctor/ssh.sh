#!/usr/bin/env bash
# doctor: the machines of run_multinode.sh. Sourced by doctor.sh.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

doctor::ssh() {
  if [[ -z ${HOSTS:-} ]]; then
    doctor::row skip ssh "HOSTS is not set, which run_multinode.sh needs"
    return
  fi
  hosts::load
  if doctor::has_config; then doctor::run_check hosts "${#hosts[@]} machines" hosts::check; fi
  doctor::run_check ssh "${hosts[*]}: reachable, with the repository" doctor::ssh_check
}

doctor::ssh_check() (
  container::choose ssh
  ssh::command
  ssh::check
)
