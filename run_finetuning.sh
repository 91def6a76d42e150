#!/usr/bin/env bash
# Fine-tuning: trains, predicts and scores, once per seed; results in LOGDIR/RUN_NAME.
#   ./run_finetuning.sh squad INIT_CHECKPOINT=model.ckpt-28252.pt DATA=/data/squad BATCHSIZE=32 LR=4.6e-5
#   ./run_finetuning.sh glue TASK=MRPC SEEDS=1,2,3,4,5 INIT_CHECKPOINT=... DATA=... BATCHSIZE=16 LR=1.8e-5 EPOCHS=3
# Runs here in the current Python environment, or with a first option: --docker, in containers of the image CONT; --ssh, on
# the machines HOSTS; --slurm, as a job of run.sub. NAME=VALUE sets any variable of docs/variables.md: DGXNGPU is the number
# of GPUs, or processes, per node (1). RUN_NAME=<earlier run> continues that run.
# Or source a config (configs/finetune_*.sh), export DATA and INIT_CHECKPOINT, and start any run script.
set -euo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly REPO_DIR
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/log run/variables slurm/submit

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit "$1"
}

declare -a start=("$REPO_DIR/run_local.sh")
case ${1:-} in
  --docker) start=("$REPO_DIR/run_with_docker.sh") ;;
  --ssh) start=("$REPO_DIR/run_multinode.sh") ;;
  --slurm) start=(submit::job) ;;
esac
if [[ ${1:-} == --docker || ${1:-} == --ssh || ${1:-} == --slurm ]]; then shift; fi
case ${1:-} in
  squad | glue) ;;
  -h | --help | help) usage 0 ;;
  '') usage 2 >&2 ;;
  [Ss][Qq]*) log::die "$1: did you mean squad?" ;;
  *) log::die "$1: expected squad or glue first, then NAME=VALUE; for your own table: glue TASK=table" ;;
esac
for setting in "${@:2}"; do
  [[ $setting != --@(docker|ssh|slurm) ]] || log::die "$setting goes first: ./run_finetuning.sh $setting $1 ..."
  if [[ $setting == -h || $setting == --help ]]; then usage 0; fi
done
variables::take "${@:2}"
if [[ $1 == squad ]]; then
  [[ ${TASK:=squad} == squad ]] || log::die "squad TASK=$TASK: ./run_finetuning.sh glue TASK=$TASK"
  export TASK
else
  [[ ${TASK:-} != squad ]] || log::die "glue TASK=squad: ./run_finetuning.sh squad"
fi
export RANK_MODULE=finetune
if [[ ${start[0]} != submit::job ]]; then exec "${start[@]}"; fi
variables::check_names
submit::job "$REPO_DIR/run.sub"
