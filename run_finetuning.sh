#!/usr/bin/env bash
# Fine-tuning: trains, predicts and scores, once per seed; results in LOGDIR/RUN_NAME.
#   ./run_finetuning.sh squad INIT_CHECKPOINT=model.ckpt-28252.pt DATA=/data/squad BATCHSIZE=32 LR=4.6e-5
#   ./run_finetuning.sh glue TASK=MRPC SEEDS=1,2,3,4,5 INIT_CHECKPOINT=... DATA=... BATCHSIZE=16 LR=1.8e-5 EPOCHS=3
#   ./run_finetuning.sh ner INIT_CHECKPOINT=... DATA=conll2003 BATCHSIZE=16 LR=5e-5 EPOCHS=3
# Runs here in the current Python environment, or with a first option: --docker, in containers of the image CONT; --ssh, on
# the machines HOSTS; --slurm, as a job of run.sub. NAME=VALUE sets any variable of docs/variables.md: DGXNGPU is the number
# of GPUs, or processes, per node (1). RUN_NAME=<earlier run> continues that run.
# Or source a config (configs/finetune_*.sh), export DATA and INIT_CHECKPOINT, and start any run script.
set -euo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/load.sh" run/log run/variables slurm/submit

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit "$1"
}

if [[ " $* " =~ ' '(-h|--help|help)' ' ]]; then usage 0; fi
declare -A scripts=([--docker]=run_with_docker.sh [--ssh]=run_multinode.sh [--slurm]=run.sub)
script=${scripts[${1:-none}]:-}
if [[ $script ]]; then shift; else script=run_local.sh; fi
case ${1:-} in
  squad | glue | ner) ;;
  '') usage 2 >&2 ;;
  *) log::die "$1: expected squad, glue or ner first, then NAME=VALUE; for your own table: glue TASK=table" ;;
esac
variables::take "${@:2}"
case ${TASK:-} in
  '') [[ $1 == glue ]] || export TASK=$1 ;;
  "$1") ;;
  squad | ner) log::die "$1 TASK=$TASK: ./run_finetuning.sh $TASK" ;;
  *) [[ $1 == glue ]] || log::die "$1 TASK=$TASK: ./run_finetuning.sh glue TASK=$TASK" ;;
esac
export RANK_MODULE=finetune
if [[ $script != run.sub ]]; then exec "$REPO_DIR/$script"; fi
variables::check_names
submit::job "$REPO_DIR/run.sub"
