#!/usr/bin/env bash
# NCCL_TEST=1: before the first trial all ranks all-reduce vectors whose sum is known. This names a broken network, driver
# or node within a minute, rather than in the middle of a timed run. Sourced by trial.sh.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

# The ranks have a limit of their own (LIMIT_SECONDS of bert/commands/allreduce.py), and know which rank is missing; this one is for
# ranks that hang.
readonly NCCL_TEST_SECONDS=360

nccl_test::run() {
  if [[ $NCCL_TEST != 1 ]] || ((WORLD_SIZE == 1)); then return 0; fi
  local -rx RANK_MODULE=bert.commands.allreduce TRIAL=0
  local -r folder=$RUN_DIR/nccl_test$restart_suffix
  local problem
  log::info "all-reduce test of $WORLD_SIZE ranks, at most $((NCCL_TEST_SECONDS - 60)) s"
  if trial::test "$folder" "$NCCL_TEST_SECONDS" bandwidth.txt; then return 0; fi
  attempt::again "the all-reduce test failed: $problem"
  attempt::end 1 "the all-reduce test failed: $problem; see $folder, or set NCCL_TEST=0"
}
