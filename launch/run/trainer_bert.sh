#!/usr/bin/env bash
# The trial loop's interface to pretraining. trial.sh sources the file of RANK_MODULE; trainer_finetune.sh has the same
# functions.
#   trainer::defaults           sets its defaults of launcher variables; refuses what it does not support
#   trainer::complete N FOLDER  has trial N left its whole result in FOLDER?
#   trainer::verify N           adds problems of a complete trial to failures
#   trainer::show               prints the table of results
#   trainer::success            prints the last line of a run in which no trial failed

trainer::defaults() { :; }

trainer::complete() { [[ -s $2/result_$1.txt ]]; }

trainer::verify() {
  # In a subshell: otherwise a trap's message would go into the redirection.
  if [[ $CHECK_COMPLIANCE == 1 ]] && ! (runner::python -m mlperf_logging.compliance_checker --usage training \
    --ruleset "$MLPERF_RULESET" --log_output /dev/null "$RUN_DIR/result_$1.txt") >"$RUN_DIR/compliance_$1.out" 2>&1; then
    failures+=("trial $1: compliance check failed, see $RUN_DIR/compliance_$1.out")
  fi
}

trainer::show() { runner::python -m review show "$RUN_DIR"; }

# A run without a target (TARGET_MLM_ACCURACY=0) or evaluation ends with its last step.
trainer::success() {
  local -r target=${TARGET_MLM_ACCURACY:-0.72}
  local done='reached the target' who="all $NEXP trials"
  if [[ ${EVAL_ITER_SAMPLES:-} == 0 || ! ${target//[0.]/} ]]; then done='trained to the last step'; fi
  if ((NEXP == 1)); then who='the trial'; fi
  echo "$who $done"
}
