#!/usr/bin/env bash
# BERT-1.5B and 5B from scratch with Habana's recipe: LANS on 12,288 sequences of 128 tokens, 20 of them masked.
# Exports only; sourced by the configs of these models, which first export BERT_CONFIG, the name of a file in models/.
BERT_CONFIG=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/models" && pwd -P)/$BERT_CONFIG
export BERT_CONFIG
export SUBMISSION_DIVISION=open INIT_CHECKPOINT='' CHECK_COMPLIANCE=0 CLEAR_CACHES=0
# What prepare_data.sh --phases writes for sequences of this length.
export MAX_SEQ_LENGTH=128 DATADIR_PHASE2=${DATADIR:-/data/bert}/128/hdf5/training
export CHECKPOINTDIR_PHASE1=${DATADIR:-/data/bert}/128/phase1
export PACKED=0 PACKING_FACTOR=1 EVAL_ITER_SAMPLES=0
export OPTIMIZER=lans CLIP=after MAX_GRAD_NORM=1.0 SHARD_OPTIMIZER=1 SEED=12439
export LR=1.5e-3 LR_SCHEDULE=poly WARMUP_PROPORTION=0.05 CONSTANT_PROPORTION=0.25
export WALLTIME_RUNANDTIME=10080
