#!/usr/bin/env bash
# POWER=1: samples the power of every node while a trial runs. Sourced by trial.sh. RUN_DIR/power/result_N/node_J.txt are the
# files of the MLPerf power rules, written by review.results.energy from the samples between run_start and run_stop.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

readonly STOP_SECONDS=60 # seconds after the stop request, after which a reading counts as hung
declare power_job='' power_folder=''

# Stops with one line if a node cannot read its power.
power::check() {
  if [[ $POWER != 1 ]]; then return 0; fi
  answers::run_on_all_nodes python3 -B -s -S "$REPO_DIR/launch/node/power_sampler.py" check ||
    answers::die "POWER=1: not every node can measure its power" "$answers_output"
}

power::start() {
  if [[ $POWER != 1 ]]; then return 0; fi
  power_folder=$RUN_DIR/running_$1$restart_suffix/power_$1
  mkdir -- "$power_folder"
  set -m
  {
    exec {lock_file}>&-
    runner::everywhere python3 -B -s -S "$REPO_DIR/launch/node/power_sampler.py" "$power_folder" >/dev/null 2>"$power_folder/errors"
  } &
  power_job=$!
  child::bind "$power_job"
  set +m
}

# Stops the sampling by a file that the samplers watch for: killing the launcher would lose the last sample.
power::stop() {
  if [[ -z $power_job ]]; then return 0; fi
  touch -- "$power_folder/stop"
  local seconds=$STOP_SECONDS
  if ((deadline)); then seconds=$((deadline > SECONDS ? deadline - SECONDS + 3 : 3)); fi # Slurm waits no longer
  child::wait "$power_job" "$seconds" ||
    log::warn "power was not sampled to the end on every node: $(tail -n 1 -- "$power_folder/errors")"
  power_job=''
  rm -f -- "$power_folder/stop"
  [[ -s $power_folder/errors ]] || rm -f -- "$power_folder/errors"
}

# Writes the power rules' files of trial $1. A failure here does not affect the trial.
power::report() {
  if [[ $POWER != 1 || ! -f $RUN_DIR/result_$1.txt ]]; then return 0; fi
  runner::python -m review.results.energy "$RUN_DIR/power_$1" "$RUN_DIR/result_$1.txt" \
    "$RUN_DIR/power/result_$1" || log::warn "trial $1 has no power result, see above"
}
