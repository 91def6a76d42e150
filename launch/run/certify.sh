#!/usr/bin/env bash
# An attempt at a certification, and what certify.sh, certify.sub and the start test share: the default load without a config.

# Defaults without a config: BERT-large on every GPU of a node, or a small model on two CPU ranks.
certify::defaults() {
  local -r gpus=$(certify::gpus)
  variables::default DGXSYSTEM certify
  variables::default DGXNGPU "$((gpus ? gpus : 2))"
  variables::default BATCHSIZE "$((gpus ? 16 : 1))"
  variables::default LR 0.0001
  variables::default MAX_STEPS 1000
  variables::default EVAL_ITER_SAMPLES 1000000
  variables::default EVAL_ITER_START_SAMPLES 1000000
  if [[ ${CERTIFY_MINUTES:-} ]]; then certify::share_minutes; fi
  variables::default CERTIFY_SECONDS 20
  # Width of the model without a config. On CPUs a step must be short: every round has four, and with --quick all take a minute.
  export CERTIFY_SIZE=$((gpus ? 1024 : 128))
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
  local reason
  if [[ ${DEVICE:-} == cpu ]]; then return 0; fi
  if (($(certify::gpus))); then
    export DEVICE=cuda
    return 0
  fi
  reason=$(certify::why_gpus "$1")
  if [[ ! $reason ]]; then return 0; fi
  reason="nvidia-smi lists no GPU, but $reason"
  echo "fail: node $(uname -n): $reason; DEVICE=cpu tests the CPUs; scontrol update nodename=$(uname -n) state=drain 'reason=certify: $reason'"
  exit 1
}

# Prints why a GPU belongs here; nothing if none does.
certify::why_gpus() {
  local device vendor class
  for device in "$1"/sys/bus/pci/devices/*; do
    vendor=$(cat -- "$device/vendor" 2>/dev/null || true)
    class=$(cat -- "$device/class" 2>/dev/null || true)
    # 3D controllers and accelerators of all makers, displays of NVIDIA; AMD's MI100 and MI200 are "other displays"
    case $vendor:$class in
      *:0x0302* | *:0x12* | 0x10de:0x0300* | 0x1002:0x0380*) echo "one is on the PCI bus (${device##*/})" && return 0 ;;
    esac
  done
  if [[ -e $1/proc/driver/nvidia ]]; then
    echo 'the NVIDIA driver is loaded'
  elif [[ ${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-}${SLURM_GPUS:-} ]]; then
    echo 'Slurm allocated some'
  elif [[ ${DGXSYSTEM:-} && ${DEVICE:-} != auto ]]; then
    echo "the config of $DGXSYSTEM is for GPUs"
  fi
}

# Checks the settings and creates the run folder. Needs RUN_NAME.
certify::prepare() {
  [[ $CERTIFY_SECONDS =~ ^[0-9]*[.]?[0-9]+$ && $CERTIFY_SECONDS =~ [1-9] ]] ||
    log::die "CERTIFY_SECONDS='$CERTIFY_SECONDS': expected a number above 0"
  variables::make_run_dir
  if [[ -z ${BERT_CONFIG:-} ]]; then
    export BERT_CONFIG=$RUN_DIR/bert_config.json
    certify::model "$CERTIFY_SIZE" "$((CERTIFY_SIZE / 64))" >"$BERT_CONFIG"
  fi
  # shellcheck disable=SC2034 # for other parts
  CONTINUED_BY=$(if [[ ${DURATION:-} ]]; then echo "RUN_NAME=$RUN_NAME continues the burn-in"; else echo 'no verdict'; fi)
  rm -f -- "$RUN_DIR/error_0.txt" "$RUN_DIR/output.txt" "$RUN_DIR/status" "$RUN_DIR/certify.json"
  # An interrupted burn-in continues.
  if [[ ! ${DURATION:-} || ! -f $RUN_DIR/burn_in.json ]]; then
    rm -rf -- "$RUN_DIR"/{certify_*.npz,burn_in*.json*,burn_in_*.npz,tools_*}
  fi
}

# Prints the config of a model of width $1 and $2 heads; 1024: BERT-large.
certify::model() {
  local layers=2 words=4096
  if (($1 == 1024)); then layers=24 words=30522; fi
  echo "{\"vocab_size\": $words, \"max_position_embeddings\": 512, \"hidden_size\": $1, \"num_attention_heads\": $2," \
    "\"num_hidden_layers\": $layers, \"intermediate_size\": $((4 * $1))}"
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
