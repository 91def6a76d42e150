#!/usr/bin/env bash
# Samsung's 1,024 A100 of v1.1: 128 nodes of 8 GPUs, 16 sequences per GPU, global batch 16,384 sequences.
# Open division: Adam. Data in four length bins (prepare_data.sh --binned-data), with a fixed count of each in a
# batch, balanced by length within a node: DATADIR_PHASE2 is the folder hdf5/bins.
# Samsung's learning-rate rule: after step 65 the rate jumps from the warm-up to the decay line, 16% higher.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export SUBMISSION_DIVISION=open
export DGXNNODES=128 DGXNGPU=8
export PACKED=0 PACKING_FACTOR=1 BATCHSIZE=16 GRADIENT_STEPS=1 BATCHING=bins BIN_COUNTS=6:3:2:5 EXCHANGE_GROUP=8
export OPTIMIZER=adamw OPT_ADAM_BETA_1=0.8003575444254268 OPT_ADAM_BETA_2=0.8174653681457493
export OPT_ADAM_EPSILON=1e-9 OPT_ADAM_WEIGHT_DECAY=0.0028861703130042965
export LR_SCHEDULE=samsung LR=3.9299421615882676e-4 END_LR=4.94549100544884e-5 LR_DECAY_STEPS=179 MAX_STEPS=299
export WARMUP_STEPS=82 START_WARMUP_STEP=-16
export CLIP=before
export MAX_SAMPLES_TERMINATION=5000000 EVAL_ITER_START_SAMPLES=325000 EVAL_ITER_SAMPLES=325000
export WALLTIME_RUNANDTIME=6
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
