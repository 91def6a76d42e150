#!/usr/bin/env bash
# Pretrains in the phases of a config: phase 1, then phase 2 from its weights and optimizer state; with NUM_PHASES=1 only phase 1.
#   source env.sh; ./run_pretraining.sh configs/pretrain_large_H100_1x8 [--slurm | --check]
# The suffix _1x8 is 1 node of 8 GPUs: pretrain_large_H100.sh with DGXNNODES=1 DGXNGPU=8.
# Results are in LOGDIR/RUN_NAME/phase1 and phase2 (RUN_NAME: the config's name). After any interruption the same
# command continues from the newest checkpoint. --slurm submits both phases as jobs, the second dependent on the first. --check
# prints what phase 1 would be: steps, tokens, hours, memory, and whether the text is enough.
set -euo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/load.sh" run/log run/child run/variables slurm/submit

[[ $# == [12] && $1 == [^-]* && ${2:-} =~ ^(--slurm|--check)?$ ]] || log::die "usage: ./run_pretraining.sh configs/pretrain_NAME [--slurm | --check]"
readonly MODE=${2:-}
# From any folder: a config of this repository by the name that it has here.
NAMED=${1%.sh}
[[ -d $(dirname -- "$NAMED") ]] || NAMED=$REPO_DIR/$NAMED
readonly NAMED
CONFIG_FILE=$NAMED.sh
RUN_NAME=${RUN_NAME:-$(basename -- "$CONFIG_FILE" .sh)}
if [[ ! -r $CONFIG_FILE && $NAMED =~ ^(.+)_([1-9][0-9]*)x([1-9][0-9]*)$ ]]; then
  CONFIG_FILE=${BASH_REMATCH[1]}.sh
  export DGXNNODES=${BASH_REMATCH[2]} DGXNGPU=${BASH_REMATCH[3]}
fi
readonly CONFIG_FILE
[[ -r $CONFIG_FILE ]] || log::die "$1: no such config: ls configs/pretrain_*"
variables::check_names
LOGDIR=${LOGDIR:-results}
[[ $MODE == --check ]] || mkdir -p -- "$LOGDIR/$RUN_NAME"
FOLDER=$(realpath -m -- "$LOGDIR/$RUN_NAME")
readonly FOLDER

# Exports the settings of a phase: the config's, its start and its output folders.
pretraining::settings() {
  export PHASE=$1 CONTINUED_BY="the same ./run_pretraining.sh with RUN_NAME=$RUN_NAME continues"
  # shellcheck source=configs/pretrain_large_H100.sh
  source "$CONFIG_FILE"
  export LOGDIR=$FOLDER RUN_NAME=phase$1 NEXP=1 RESUME=1 CHECKPOINT_DIR=$FOLDER/phase$1/checkpoints
  if (($1 == 2)); then export INIT_CHECKPOINT=$FOLDER/phase1/checkpoints INIT_OPTIMIZER=1; fi
}

# Prints what phase 1 would be.
pretraining::check() {
  pretraining::settings 1
  export RUN_DIR=$FOLDER/phase1 WORLD_SIZE=$((DGXNNODES * DGXNGPU)) PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}
  CONTAINER_RUNTIME=none python::choose
  exec "$PYTHON" -m bert --check
}

pretraining::start() { pretraining::settings "$1" && exec "$REPO_DIR/run_local.sh"; }

# Runs a phase here, to its end. A complete phase trains nothing.
pretraining::run() {
  local status=0
  log::info "phase $1 of $CONFIG_FILE"
  child::run pretraining::start "$1" || status=$?
  ((status == 0)) && return
  log::error "phase $1 is not complete: the same command continues it"
  exit "$status"
}

# Submits a phase; prints the number of its job. Further arguments are sbatch's. The job starts in this folder, where relative
# paths of the settings hold.
pretraining::submit() (
  pretraining::settings "$1"
  submit::job --parsable --kill-on-invalid-dep=yes "${@:2}" "$REPO_DIR/run.sub"
)

if [[ $MODE == --check ]]; then pretraining::check; fi
phases=$(pretraining::settings 1 2>/dev/null && echo "${NUM_PHASES:-2}") || {
  pretraining::settings 1 # prints the reason
  exit 2
}
if [[ $MODE == --slurm ]]; then
  first=$(pretraining::submit 1)
  if ((phases == 1)); then log::info "phase 1 is job ${first%%;*}; results go to $FOLDER" && exit; fi
  second=$(pretraining::submit 2 --dependency="afterok:${first%%;*}") || { scancel "${first%%;*}" && exit 2; }
  log::info "phase 1 is job ${first%%;*}, phase 2 job ${second%%;*} after it; results go to $FOLDER"
  exit
fi
trap child::end TERM INT HUP QUIT
pretraining::run 1
if ((phases == 2)); then pretraining::run 2; fi
log::info "complete: $FOLDER/phase$phases/checkpoints"
