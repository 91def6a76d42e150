#!/usr/bin/env bash
# START_TEST=1: certifies the nodes before the first trial, like certify.sh --quick on one machine. A node that fails is left out
# if the run can continue without it, otherwise the run ends. Sourced by trial.sh.
# shellcheck disable=SC2034,SC2154 # RUN_DIR and the variables' defaults are of the other files

start_test::run() {
  if [[ $START_TEST != 1 ]]; then return 0; fi
  local -r folder=$RUN_DIR/start_test
  local verdict='' status=0
  log::info "start test of $WORLD_SIZE ranks"
  rm -rf -- "$folder"
  mkdir -- "$folder"
  start_test::load || status=$?
  if ((status == 0 || status == 3)); then log::info "start test: $verdict" && return 0; fi
  start_test::report
  attempt::again "the start test failed: $verdict"
  attempt::end 1 "the start test failed: $verdict; see $folder, or set START_TEST=0"
}

# The nodes that failed.
start_test::report() {
  local kind rank node step reason
  if [[ ! -s $folder/unfit ]]; then return 0; fi
  while record::read; do record::report "$kind" - "$node" - "the start test: $reason"; done <"$folder/unfit"
}

# Runs the test load; sets verdict and returns the status of the verdict.
start_test::load() {
  local -x SYNTH_DATA SUBMISSION_DIVISION INIT_CHECKPOINT NEXP NCCL_TEST STAGE_DIR TRIAL RANK_MODULE SPARE_NODES
  local -x CERTIFY_SECONDS=2 DURATION='' EVAL_ITER_SAMPLES=1000000 EVAL_ITER_START_SAMPLES=1000000
  certify::defaults
  if ! trial::ranks "$folder" "$folder/output.txt" 0 >/dev/null || [[ -s $folder/status ]]; then
    verdict="the load did not run: $(head -n 1 -- "$folder/error_0.txt" 2>/dev/null || tail -n 1 -- "$folder/output.txt")"
    return 1
  fi
  verdict=$(runner::python -m review certify "$folder" --line --records "$folder/unfit") || status=$?
  verdict=${verdict:-no verdict, see above}
  return "$status"
}
