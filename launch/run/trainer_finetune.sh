#!/usr/bin/env bash
# The trial loop's interface to fine-tuning: a trial is a seed. Sourced by trial.sh; trainer_bert.sh describes the functions.

trainer::defaults() {
  local commas=${SEEDS:-}
  commas=${commas//[^,]/}
  [[ ${REHEARSAL:-0} == 0 ]] || log::die 'REHEARSAL=1 compares with published runs of pretraining: unset it to fine-tune'
  [[ ${POWER:-0} == 0 ]] || log::die 'POWER=1 measures the power of timed runs of pretraining: unset it to fine-tune'
  [[ ! ${STAGE_DIR:-} ]] || log::die 'STAGE_DIR copies the records of pretraining: unset it to fine-tune'
  variables::default DGXNGPU 1
  variables::default DGXSYSTEM "finetune_${TASK:-unset}"
  variables::default CLEAR_CACHES 0
  container_inputs+=(DATA)
  if [[ ${SEEDS:-} ]]; then
    [[ ${NEXP:-$((${#commas} + 1))} == $((${#commas} + 1)) ]] ||
      log::die "NEXP=$NEXP and SEEDS=$SEEDS: a seed is a trial; unset NEXP"
    export NEXP=$((${#commas} + 1))
  fi
}

trainer::complete() { [[ -s $2/model_$1/figures.json ]]; }

trainer::verify() { :; }

trainer::show() {
  if ! compgen -G "$RUN_DIR/model_*/figures.json" >/dev/null; then return 0; fi # the last line gives the reason
  runner::python -m finetune seeds "$RUN_DIR"
}

trainer::success() { echo "all $NEXP trials are complete"; }
