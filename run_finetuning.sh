#!/usr/bin/env bash
# Fine-tunes on this machine: trains, predicts and scores, once per seed; results in LOGDIR/RUN_NAME.
#   ./run_finetuning.sh squad INIT_CHECKPOINT=model.ckpt-28252.pt DATA=/data/squad BATCHSIZE=32 LR=4.6e-5
#   ./run_finetuning.sh glue TASK=MRPC SEEDS=1,2,3,4,5 INIT_CHECKPOINT=... DATA=... BATCHSIZE=16 LR=1.8e-5 EPOCHS=3
# NAME=VALUE sets any variable of `python -m bert --variables`. DGXNGPU is the number of GPUs, or processes (1).
# The name of an earlier run continues it: RUN_NAME=...
set -euo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly REPO_DIR
for part in log variables port binding; do
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/$part.sh"
done

usage() {
  sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit "$1"
}

settings() {
  local setting
  case ${1:-} in
    squad) export TASK=squad ;;
    glue) ;;
    -h | --help | help) usage 0 ;;
    *) usage 2 >&2 ;;
  esac
  for setting in "${@:2}"; do
    [[ $setting =~ ^[A-Z][A-Z0-9_]*= ]] || log::die "$setting: expected NAME=VALUE"
    export "${setting?}"
  done
  if [[ -z ${PYTHON:-} && -x $REPO_DIR/.venv/bin/python ]]; then export PYTHON=$REPO_DIR/.venv/bin/python; fi
  variables::check_names
  variables::default PYTHON python
  variables::default LOGDIR results
  variables::default DGXNGPU 1
  variables::default BINDING numa
  variables::default REHEARSAL 0
  [[ $DGXNGPU =~ ^[1-9][0-9]*$ ]] || log::die "DGXNGPU='$DGXNGPU': expected an integer, at least 1"
  export DGXSYSTEM=${DGXSYSTEM:-finetune_${TASK:-unset}} RANK_MODULE=finetune
  variables::make_run_dir
}

# One seed. A trial that has its figures is not run again.
trial() {
  local -rx TRIAL=$1
  if [[ -f $RUN_DIR/model_$TRIAL/figures.json ]]; then return; fi
  rm -f -- "$RUN_DIR/error_$TRIAL.txt"
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(binding::threads "$DGXNGPU")}
  GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} "$PYTHON" -m torch.distributed.run \
    --nnodes 1 --nproc-per-node "$DGXNGPU" --master-addr 127.0.0.1 --master-port "$(port::free)" \
    --no-python "$REPO_DIR/run_and_time.sh" 2> >(tee -- "$RUN_DIR/output_$TRIAL.txt" >&2) && return
  [[ -s $RUN_DIR/error_$TRIAL.txt ]] || log::die "trial $TRIAL failed, see $RUN_DIR/output_$TRIAL.txt"
  log::die "$(<"$RUN_DIR/error_$TRIAL.txt")"
}

settings "$@"
log::info "results go to $RUN_DIR"
commas=${SEEDS:-}
commas=${commas//[^,]/}
for ((number = 0; number <= ${#commas}; number++)); do trial "$number"; done
PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -m finetune seeds "$RUN_DIR"
