#!/usr/bin/env bash
# make demo: text -> prepared data -> timed runs of a small BERT -> table of results, on this machine.
# CORPUS=file uses your own text (one sentence per line with a blank line between documents, or plain prose).
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/../.."
# shellcheck source=launch/tools/demo_begin.sh
source launch/tools/demo_begin.sh
DATADIR=$(realpath -m -- "${DEMO_DIR:-demo}")
mkdir -p -- "$DATADIR"
export DATADIR LOGDIR=$DATADIR/results

fail() { echo "demo: error: $*" >&2 && exit 2; }

[[ $CORPUS == pydoc || -r $CORPUS ]] || fail "CORPUS=$CORPUS: no such readable file"

demo::step "1/3  text: $CORPUS"
child::run "$PYTHON" -m input_preprocessing corpus --input "$CORPUS" --outputdir "$DATADIR" \
  --vocab-size 2048 --layers 2 --hidden-size 128 --max-seq-length 128

demo::step '2/3  data: tokenise and mask, shuffle, pack, evaluation set'
child::run input_preprocessing/prepare_data.sh --outputdir "$DATADIR" --packed-data --skip-download --shards 4 --jobs 2 \
  --max-seq-length 128 --max-predictions-per-seq 19 --num-eval-samples 500

demo::step '3/3  training: NEXP timed runs, as run.sub starts them on a cluster'
# shellcheck source=env.sh
source env.sh
# shellcheck source=configs/config_demo_1x2x16x1_pack.sh
source configs/config_demo_1x2x16x1_pack.sh
# Adapts the config to this text and machine; your own exports win.
declare -A made=()
exports::noted CONFIG made
demo::set() { if [[ ${made[$1]-} == "${!1}" ]]; then export "$1=$2"; fi; }
demo::set NUM_EVAL_EXAMPLES "$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["eval_samples"])' \
  "$DATADIR/prepared-packed.json")"
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
# One process per GPU; without GPUs, two processes share the CPUs.
if ((gpus == 1)); then
  demo::set DGXNGPU 1
  demo::set GRADIENT_STEPS 2
fi
export NEXP=${NEXP:-2} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} RUN_NAME=${RUN_NAME:-demo_$(date +%Y%m%d-%H%M%S)}
status=0
child::run ./run_local.sh || status=$?
printf -v RESULTS '%q' "$(realpath --relative-to=. -- "$LOGDIR/$RUN_NAME")"
demo::next "python -m review show $RESULTS" "python -m review watch $RESULTS --once" "python -m review report $RESULTS -o report.html" \
  'LR=0.02 make demo               # with your own setting; python -m bert --variables lists them'
exit "$status"
