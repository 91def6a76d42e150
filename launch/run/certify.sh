#!/usr/bin/env bash
# An attempt at a certification, and what certify.sh, certify.sub and the start test share: the default load without a config.

# Defaults without a config: BERT-large on every GPU of a node, or a small model on two CPU ranks.
certify::defaults() {
  local -r gpus=$(certify::gpus)
  variables::defaults DGXSYSTEM=certify "DGXNGPU=$((gpus ? gpus : 2))" "BATCHSIZE=$((gpus ? 16 : 1))" LR=0.0001 MAX_STEPS=1000 \
    EVAL_ITER_SAMPLES=1000000 EVAL_ITER_START_SAMPLES=1000000
  if [[ ${CERTIFY_MINUTES:-} ]]; then certify::share_minutes; fi
  variables::default CERTIFY_SECONDS 20
  export SYNTH_DATA=1 SUBMISSION_DIVISION=open NEXP=1 NCCL_TEST=0 STAGE_DIR='' TRIAL=0 SPARE_NODES=0 CHECKPOINT_DIR='' RANK_MODULE=certify
}

# Sets CERTIFY_SECONDS, so that all stages together take CERTIFY_MINUTES. Needs DGXNNODES.
certify::share_minutes() {
  # single takes one stage's time for each rank of a node; then parallel, together, and node, pairs.
  local -r stages=$((DGXNGPU + (DGXNNODES > 1 ? 4 : 2)))
  [[ $CERTIFY_MINUTES =~ ^[1-9][0-9]{0,4}$ ]] || log::die "CERTIFY_MINUTES='$CERTIFY_MINUTES': expected whole minutes, from 1 on"
  [[ ! ${CERTIFY_SECONDS:-} ]] ||
    log::die "CERTIFY_MINUTES=$CERTIFY_MINUTES and CERTIFY_SECONDS=$CERTIFY_SECONDS (2 by --quick): give one of them"
  CERTIFY_SECONDS=$((60 * CERTIFY_MINUTES / stages))
  if ((CERTIFY_SECONDS == 0)); then CERTIFY_SECONDS=1; fi
}

# Prints the number of GPUs that the driver runs; it may hang with one that is broken.
certify::gpus() {
  timeout 60 nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c '^[0-9]' || true
}

# Ends a test that would run on CPUs for want of a GPU that belongs here, and has GPUs tested where there are some: a good test of
# the CPUs would say nothing about them. DEVICE=cpu asks for it. $1: root of /sys and /proc; needs the config's DGXSYSTEM.
certify::require_gpus() {
  if [[ ${DEVICE:-} == cpu ]]; then return 0; fi
  if (($(certify::gpus))); then export DEVICE=cuda && return; fi
  local reason
  reason=$(python::host "$REPO_DIR/launch/node/gpus.py" "$1") ||
    log::die "$(uname -n): python3 cannot tell whether a GPU belongs here"
  if [[ ! $reason ]]; then return 0; fi
  reason="nvidia-smi lists no GPU, but $reason"
  echo "fail: node $(uname -n): $reason; DEVICE=cpu tests the CPUs; scontrol update nodename=$(uname -n) state=drain 'reason=certify: $reason'"
  exit 1
}

# Checks the settings and creates the run folder. Needs RUN_NAME.
certify::prepare() {
  [[ $CERTIFY_SECONDS =~ ^[0-9]*[.]?[0-9]+$ && $CERTIFY_SECONDS =~ [1-9] ]] ||
    log::die "CERTIFY_SECONDS='$CERTIFY_SECONDS': expected a number above 0"
  variables::make_run_dir
  # On CPUs a step must be short: every round has four, and with --quick all take a minute.
  variables::default BERT_CONFIG "$REPO_DIR/configs/models/$([[ ${DEVICE:-} == cuda ]] && echo bert_large || echo certify_cpus).json"
  # shellcheck disable=SC2034 # for other parts
  CONTINUED_BY=$(if [[ ${DURATION:-} ]]; then echo "RUN_NAME=$RUN_NAME continues the burn-in"; else echo 'no verdict'; fi)
  rm -f -- "$RUN_DIR/error_0.txt" "$RUN_DIR/output.txt" "$RUN_DIR/status" "$RUN_DIR/certify.json"
  # An interrupted burn-in continues.
  if [[ ! ${DURATION:-} || ! -f $RUN_DIR/burn_in.json ]]; then
    rm -rf -- "$RUN_DIR"/{certify_*.npz,burn_in*.json*,burn_in_*.npz,tools_*}
  fi
}

# The load on all ranks.
certify::run() {
  local status=0
  trial::ranks "$RUN_DIR" "$RUN_DIR/output.txt" 0 >/dev/null || status=$?
  if ((status == 0)) && [[ ! -s $RUN_DIR/status ]]; then return; fi
  log::die "the load did not run: $(head -n 1 -- "$RUN_DIR/error_0.txt" 2>/dev/null || tail -n 1 -- "$RUN_DIR/output.txt")"
}

# Calls CERTIFY_HOOK with the verdict's file. The site's own command, so that its failure changes no verdict.
certify::hook() {
  local -a hook
  read -ra hook <<<"${CERTIFY_HOOK:-}"
  if ((${#hook[@]})) && [[ -f $RUN_DIR/certify.json ]]; then
    timeout 300 "${hook[@]}" "$RUN_DIR/certify.json" </dev/null >&2 ||
      log::warn "CERTIFY_HOOK='$CERTIFY_HOOK' ended with status $?"
  fi
}

certify::main() {
  local output where status=0
  trial::traps
  runner::prepare
  preflight::outputs
  certify::prepare
  [[ ${DEVICE:-} == cuda ]] || where=', on CPUs'
  [[ ${CERTIFY_LINE:-} ]] ||
    log::info "certifying $DGXNNODES nodes of $DGXNGPU ranks each${where:-}, about $CERTIFY_SECONDS s a stage, the first for each rank: $RUN_DIR"
  if ((DGXNNODES > 1)); then preflight::record; fi
  certify::run
  output=$(runner::python -m review certify "$RUN_DIR" --save "$RUN_DIR/certify.json" ${CERTIFY_LINE:+"$CERTIFY_LINE"} 2>&1) || status=$?
  grep -v '^srun: error: ' <<<"$output" # srun's line on the exit status
  certify::hook
  exit "$status"
}
