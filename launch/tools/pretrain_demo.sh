#!/usr/bin/env bash
# make pretrain-demo: text -> data of both phases -> both phases of a small BERT -> phase 1 alone for as long -> which is
# better on held-out text -> Hugging Face. Interrupted, the same command continues. CORPUS=file takes your own text.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/../.."
# shellcheck source=launch/tools/demo_begin.sh
source launch/tools/demo_begin.sh
DATADIR=${DEMO_DIR:-demo}/pretraining
mkdir -p "$DATADIR"
DATADIR=$(cd "$DATADIR" && pwd)
export DATADIR LOGDIR=$DATADIR/results OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
readonly CONFIG=configs/pretrain_demo RUNS=$LOGDIR/pretrain_demo MODEL=$DATADIR/my-bert
unset RUN_NAME

# Seconds and steps of a phase's training, from its figures.
figures() {
  "$PYTHON" -c 'import json, sys; last = [json.loads(line) for line in open(sys.argv[1])][-1]
print(last["raw_train_time"], last["step"])' "$RUNS/$1/metrics_0.jsonl"
}

# Phase 1 for as long as both phases took.
alone() {
  local first second
  first=$(figures phase1)
  second=$(figures phase2)
  export PHASE=1 RUN_NAME=alone NEXP=1 RESUME=1 CHECKPOINT_DIR=$RUNS/alone/checkpoints
  MAX_STEPS=$(awk -v a="${first% *}" -v n="${first#* }" -v b="${second% *}" 'BEGIN { printf "%d", n * (a + b) / a + 0.5 }')
  export MAX_STEPS LOGDIR=$RUNS
  # shellcheck source=configs/pretrain_demo.sh
  source "$CONFIG.sh"
  exec ./run_local.sh
}

demo::step "1/5  data of both phases, 32 and 128 tokens, of: $CORPUS"
child::run input_preprocessing/prepare_data.sh --outputdir "$DATADIR" --phases 32:5,128:20 --input "$CORPUS" --vocab-size 2048 \
  --layers 2 --hidden-size 128 --packed-data --shards 4 --jobs 2 --num-eval-samples 500

demo::step '2/5  phase 1, then phase 2 from its weights and optimizer'
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus == 1)); then export DGXNGPU=1 GRADIENT_STEPS=2; fi
child::run ./run_pretraining.sh "$CONFIG"

demo::step '3/5  phase 1 alone, for as long'
child::run alone

demo::step '4/5  held-out text, sequences of 128 tokens'
export EVALDIR=$DATADIR/128/eval
"$PYTHON" -m bert evaluate --json "$RUNS/phase1" "$RUNS/alone" "$RUNS/phase2" | "$PYTHON" -c 'import json, sys
names = ("phase 1", "phase 1 alone for as long", "phase 1 + 2")
lines = dict(zip(names, map(json.loads, sys.stdin), strict=True))
for name, line in lines.items():
    print("{:<26} masked-LM loss {mlm_loss:.4f}, accuracy {accuracy:.4f}".format(name, **line))
_, alone, both = (line["mlm_loss"] for line in lines.values())
word = "lower than" if both < alone else "not lower than"
print(f"phase 1 + 2 has a masked-LM loss {word} phase 1 alone for as long: {both:.4f} and {alone:.4f}")'

demo::step '5/5  as Hugging Face has it'
"$PYTHON" -m bert export "$RUNS" -o "$MODEL"
"$PYTHON" -m bert fill-mask "$MODEL" "The try [MASK] specifies exception handlers for a group of statements."
cat >&2 <<NEXT

What to do next:
  source .venv/bin/activate
  python -m bert fill-mask ${MODEL@Q} "A [MASK] is an object that contains other objects."
  pip install transformers    # then AutoModelForPreTraining, AutoModel and pipeline("fill-mask") take the same folder
  ./run_pretraining.sh configs/pretrain_large_H100_1x8    # the real one: docs/train.md
NEXT
