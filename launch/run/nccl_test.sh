#!/usr/bin/env bash
# NCCL_TEST=1: before the first trial all ranks all-reduce vectors whose sum is known. This names a broken network, driver
# or node within a minute, rather than in the middle of a timed run. Sourced by trial.sh.
# shellcheck disable=SC2154 # RUN_DIR, the variables' defaults and trial::ranks are of the other files

# The ranks have a limit of their own (LIMIT_SECONDS of bert/commands/allreduce.py), and know which rank is missing; this one is for
# ranks that hang.
readonly NCCL_TEST_SECONDS=360

nccl_test::run() {
  if [[ $NCCL_TEST != 1 ]] || ((WORLD_SIZE == 1)); then return 0; fi
  local -r folder=$RUN_DIR/running_nccl_test
  local -rx RANK_MODULE=bert.commands.allreduce TRIAL=0
  local reason='' status=0
  rm -rf -- "$folder"
  mkdir -- "$folder"
  log::info "all-reduce test of $WORLD_SIZE ranks, at most $((NCCL_TEST_SECONDS - 60)) s"
  local -r limit=$NCCL_TEST_SECONDS start=$SECONDS output=$RUN_DIR/nccl_test.txt
  rm -f -- "$output"
  trial::ranks "$folder" "$output" "$limit" || status=$?
  if [[ -s $folder/status ]]; then status=1; fi
  if ((status == 0)) && ! grep -qs 'all sums right' "$output"; then
    status=1 reason=$(answers::reason "$(tail -n 20 -- "$output" 2>/dev/null)")
  fi
  if ((SECONDS - start >= limit)); then reason="it did not end in $limit s"; fi
  if [[ -s $folder/error_0.txt ]]; then reason=$(<"$folder/error_0.txt"); fi
  rm -rf -- "$folder"
  if ((status)); then
    attempt::end 1 "the all-reduce test failed: ${reason:-exit status $status}; see $output, or set NCCL_TEST=0"
  fi
}
