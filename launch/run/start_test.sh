#!/usr/bin/env bash
# START_TEST=1: certifies the nodes before the first trial, like certify.sh --quick on one machine. A node that fails is left out
# if the run can continue without it, otherwise the run ends. Sourced by trial.sh.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

start_test::run() {
  if [[ $START_TEST != 1 ]]; then return 0; fi
  local -r folder=$RUN_DIR/start_test$restart_suffix
  local problem='' status=0
  log::info "start test of $WORLD_SIZE ranks"
  start_test::load || status=$?
  if ((status == 0 || status == 3)); then log::info "start test: $problem" && return 0; fi
  attempt::again "the start test failed: $problem"
  attempt::end 1 "the start test failed: $problem; see $folder, or set START_TEST=0"
}

# Runs the test load, and reports the nodes that failed; sets problem to the verdict and returns its status.
start_test::load() {
  local -x SYNTH_DATA SUBMISSION_DIVISION NEXP NCCL_TEST STAGE_DIR TRIAL RANK_MODULE SPARE_NODES CHECKPOINT_DIR MAX_STEPS
  # Fine-tuning's shortest default: pretraining's may not fit the GPU.
  local -x MAX_SEQ_LENGTH=${MAX_SEQ_LENGTH:-${TASK:+128}}
  local -x CERTIFY_SECONDS=2 CERTIFY_MINUTES='' DURATION='' EVAL_ITER_SAMPLES=1000000 EVAL_ITER_START_SAMPLES=1000000
  certify::defaults
  trial::test "$folder" 0 >/dev/null || return 1
  problem=$(runner::python -m review certify "$folder" --line --records "$folder/unfit") || status=$?
  problem=${problem:-no verdict, see above}
  sed 's/[^\t]*$/the start test: &/' -- "$folder/unfit" 2>/dev/null >>"$ATTEMPT_STATUS" || true
  return "$status"
}
