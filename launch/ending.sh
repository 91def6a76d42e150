#!/usr/bin/env bash
# How the trial loop ends: the last line says what came of it, the exit status says it again.

# State of the loop: what failed so far, the trial that runs, and its process group.
declare -a failures=()
declare current='' group=''

trial::conclude() {
  local list
  if ((${#failures[@]})); then
    printf -v list '; %s' "${failures[@]}"
    log::error "${#failures[@]} of $NEXP trials failed: ${list#; }"
    exit 1
  fi
  log::info "all $NEXP trials reached the target: $RUN_DIR"
}

trial::interrupted() {
  local -r signal=$1 status=$2
  trap '' INT TERM HUP
  if [[ -n $group ]]; then trial::end_group; fi
  rm -rf -- "${RUN_DIR:-$REPO_DIR/no run yet}/running_nccl_test"
  if [[ -n $current ]]; then trial::collect "$current" "$status" || true; fi
  log::error "interrupted by SIG$signal${RUN_NAME:+; RUN_NAME=$RUN_NAME continues with the missing trials}"
  exit "$status"
}
