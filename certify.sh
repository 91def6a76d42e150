#!/usr/bin/env bash
# Is every GPU of this machine as fast as its sisters, and do all compute the same? The step of the benchmark on made-up
# data, without checkpoint or data set; docs/certify.md.
#   [source configs/config_<SYSTEM>_....sh;] ./certify.sh     the config's batch and model, or BERT-large on all GPUs
# Exit status: 0 pass, 1 fail, 2 bad input.
set -euo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly REPO_DIR
for part in log variables binding port; do
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/$part.sh"
done

# What a config has not set: BERT-large on every GPU, or a small model on two CPU ranks.
certify::defaults() {
  local -r gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c '^[0-9]' || true)
  local large='"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096'
  if ((gpus == 0)); then large='"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024'; fi
  variables::default DGXSYSTEM certify
  variables::default DGXNGPU "$((gpus ? gpus : 2))"
  variables::default BATCHSIZE "$((gpus ? 16 : 2))"
  variables::default LR 0.0001
  variables::default MAX_STEPS 1000
  variables::default EVAL_ITER_SAMPLES 1000000
  variables::default EVAL_ITER_START_SAMPLES 1000000
  variables::default CERTIFY_SECONDS 20
  export SYNTH_DATA=1 SUBMISSION_DIVISION=open INIT_CHECKPOINT='' NEXP=1 DGXNNODES=1
  RUN_NAME=${RUN_NAME:-certify_$(uname -n)_$(date +%Y%m%d-%H%M%S)}
  variables::load
  [[ $CERTIFY_SECONDS =~ ^[0-9]*[.]?[0-9]+$ && $CERTIFY_SECONDS =~ [1-9] ]] ||
    log::die "CERTIFY_SECONDS='$CERTIFY_SECONDS': expected a number above 0"
  variables::make_run_dir
  if [[ -z ${BERT_CONFIG:-} ]]; then
    export BERT_CONFIG=$RUN_DIR/bert_config.json
    echo "{\"vocab_size\": 30522, \"max_position_embeddings\": 512, $large}" >"$BERT_CONFIG"
  fi
}

if [[ -z ${PYTHON:-} && -x $REPO_DIR/.venv/bin/python ]]; then export PYTHON=$REPO_DIR/.venv/bin/python; fi
certify::defaults
rm -f -- "$RUN_DIR"/certify_rank*.json "$RUN_DIR/error_0.txt"
log::info "certifying $DGXNGPU ranks of $(uname -n), about $CERTIFY_SECONDS s for each rank and for each of two stages: $RUN_DIR"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(binding::threads "$DGXNGPU")}
export OMP_NUM_THREADS TRIAL=0 RANK_MODULE=bert.certify GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
export PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}
if ! "$PYTHON" -m torch.distributed.run --nnodes 1 --nproc-per-node "$DGXNGPU" --master-addr 127.0.0.1 \
  --master-port "$(port::free)" --no-python "$REPO_DIR/launch/rank.sh" >"$RUN_DIR/output.txt" 2>&1; then
  log::die "the load did not run: $(head -n 1 -- "$RUN_DIR/error_0.txt" 2>/dev/null || tail -n 1 -- "$RUN_DIR/output.txt")"
fi
exec "$PYTHON" -m review certify "$RUN_DIR"
