#!/usr/bin/env bash
# The trials of an attempt, the same on all platforms, whose runner.sh defines:
#   runner::prepare        checks and containers, before anything is written
#   runner::everywhere C.. runs a command on every node, outside containers, also during a trial
#   runner::trial          all ranks of one trial; RUN_DIR, TRIAL, SEED and CACHE_CLEARED are exported
#   runner::python ARG...  one Python process in the environment of the ranks
#   runner::cleanup        removes what prepare created, also after a failure
# and as supervisor.sh describes them, platform::why, platform::blame and platform::blame_by_output.
# All ranks run launch/run/rank.sh with the trainer RANK_MODULE (bert or finetune, see trainer_bert.sh), or with a test before
# the first trial (NCCL_TEST=1).
# A trial writes to RUN_DIR/running_N. Its log becomes RUN_DIR/result_N.txt once complete, failed_N.txt otherwise.
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/log run/variables run/child run/record run/restart run/answers run/port run/ending run/ranks run/preflight \
  run/nccl_test run/certify run/start_test run/power run/rehearsal node/state
# shellcheck disable=SC2034 # for other parts
readonly START_MINUTES=5   # of a trial's part of WALLTIME, see configs/common.sh
declare -i trial_minutes=0 # that a trial may take while others are to follow it; 0: any
# Suffix of folders after a restart, or without some nodes: old ranks on a node that is cut off may still write to theirs.
declare restart_suffix=''

trial::main() {
  rehearsal::settings
  trial::traps
  node_state::check
  runner::prepare
  node_state::lock_clocks # first: a GPU may refuse
  power::check
  preflight::check
  preflight::outputs
  variables::make_run_dir
  if [[ -s $RUN_DIR/restarts.txt ]]; then restart_suffix=_$(wc -l <"$RUN_DIR/restarts.txt"); fi
  log::info "results go to $RUN_DIR"
  trial::check_finished # before anything is written that belongs to this run alone
  preflight::record
  nccl_test::run
  start_test::run
  local trial status
  for ((trial = 0; trial < NEXP; trial++)); do
    status=0
    trainer::complete "$trial" "$RUN_DIR" || trial::run "$trial" || status=$?
    if ((status == 1)); then attempt::again "trial $trial: ${reasons[trial]}"; fi
    trial::verify "$trial"
    if ((status == 2)); then break; fi # bad input: the next trial would fail too
  done
  trainer::show || log::warn 'no table of results, see above'
  rehearsal::judge
  trial::conclude
}

# Finished trials count only if their settings and data are the same, which the trainer's check of the run folder decides.
trial::check_finished() {
  local -x TRIAL
  local output
  for ((TRIAL = 0; TRIAL < NEXP; TRIAL++)); do
    trainer::complete "$TRIAL" "$RUN_DIR" || continue
    # Nothing is written into the folder of a run that this one may turn out not to be.
    output=$(trial::with_seed runner::python -m "${RANK_MODULE:-bert}" --check 2>&1) && continue
    log::die "this configuration cannot run: $(answers::program_error "$output")"
  done
}

# Runs a command with the seed of the trial TRIAL; SEED stays unset, or empty, where it is.
trial::with_seed() {
  if [[ ${SEED:-} ]]; then local -x SEED=$((10#$SEED + TRIAL)); fi
  "$@"
}

# One trial: returns 0 (target reached), 3 (not reached), 2 (bad input) or 1 (crashed).
trial::run() {
  local -r trial=$1
  local launched=0 status=0 cleared=0 figures
  node_state::drop_caches && cleared=1
  mkdir -p -- "$RUN_DIR/.begun_$trial"
  if restart::ask continues; then # keeps the metrics that a resumed trial appends to
    for figures in "$RUN_DIR"/{,running_"$trial"/,running_"$trial"_*/}{metrics_"$trial".jsonl,tensorboard_"$trial",wandb_"$trial"}; do
      if [[ -e $figures ]]; then cp -rup -t "$RUN_DIR/.begun_$trial" -- "$figures"; fi
    done
  fi
  rm -rf -- "$RUN_DIR"/{running_"$trial",running_"$trial"_*,{error,failed,hang,step}_"$trial".txt,{power,model,tensorboard,wandb}_"$trial"}
  mv -T -- "$RUN_DIR/.begun_$trial" "$RUN_DIR/running_$trial$restart_suffix" || exit 1
  log::info "trial $((trial + 1)) of $NEXP starts: result_$trial.txt"
  power::start "$trial"
  trial::launch "$trial" "$cleared" || launched=$?
  trial::collect "$trial" "$launched" || status=$?
  power::report "$trial"
  return "$status"
}

trial::launch() {
  local -rx TRIAL=$1 CACHE_CLEARED=$2
  local limit=0 status=0
  # A trial that hangs would use the time of those after it; the job's own limit ends the last one.
  if ((TRIAL < NEXP - 1)); then limit=$((60 * trial_minutes)); fi
  current=$TRIAL
  trial::with_seed trial::ranks "$RUN_DIR/running_$TRIAL$restart_suffix" "$RUN_DIR/output_$TRIAL.txt" "$limit" || status=$?
  if ((limit && status == 124)); then
    reasons[TRIAL]="it did not end in $trial_minutes minutes, its part of the job's time: raise WALLTIME_RUNANDTIME if it was training"
  fi
  return "$status"
}

# Moves the trial's files into RUN_DIR; names distinguish complete logs from broken ones.
trial::collect() {
  local -r trial=$1 staging=$RUN_DIR/running_$1$restart_suffix
  local status=$2 log=failed_$1.txt kind
  # shellcheck disable=SC2034 # for other parts
  current='' # read by trial::interrupted
  power::stop
  kind=$(trial::kind "$staging" "$status")
  case $kind in '') ;; bad_input) status=2 ;; not_reached) status=3 ;; *) status=$((status > 3 ? status : 1)) ;; esac
  # A run that was asked to stop has saved and exits with 0, but is incomplete, and leaves the reason.
  if [[ $status == 0 && -s $staging/error_$trial.txt ]]; then status=1; fi
  if [[ $status == [03] ]]; then
    if trainer::complete "$trial" "$staging"; then log=result_$trial.txt; else status=1; fi
  fi
  if ((status)); then
    reasons[trial]=$(trial::reason "$trial" "$status" "$staging" "$kind")
    # The disk may be full.
    { echo "${reasons[trial]}" >"$staging/error_$trial.txt"; } 2>/dev/null || true
    trial::blame "$staging" "$trial" "$kind"
  fi
  rm -f -- "$staging"/{status,.writer_"$trial"}
  if [[ -e $staging/result_$trial.txt ]]; then mv -f -- "$staging/result_$trial.txt" "$RUN_DIR/$log"; fi
  find "$staging" -mindepth 1 -maxdepth 1 -exec mv -f -t "$RUN_DIR" -- {} +
  rmdir -- "$staging"
  return "$((status > 3 ? 1 : status))"
}

trial::verify() {
  local -r trial=$1
  if [[ ${reasons[trial]:-} || -f $RUN_DIR/error_$trial.txt ]]; then
    failures+=("trial $trial: ${reasons[trial]:-$(<"$RUN_DIR/error_$trial.txt")}")
  else
    trainer::verify "$trial"
  fi
}
