#!/usr/bin/env bash
# The launcher's own variables: defaults, checks, and the folder of this run. Sourced by the run scripts.
# The trainer's variables have their defaults in Python (python -m bert --variables).

# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/exports run/python

# Folders that ranks write to, besides LOGDIR; the last four are compiler caches, if exported by the user.
# shellcheck disable=SC2034 # for other parts
declare -a variables_outputs=(CHECKPOINT_DIR KERNEL_CACHE TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR CUDA_CACHE_PATH NUMBA_CACHE_DIR)

variables::default() {
  local -r name=$1 value=$2
  export "$name=${!name:-$value}"
}

# The same of each NAME=VALUE.
variables::defaults() {
  local setting
  for setting in "$@"; do variables::default "${setting%%=*}" "${setting#*=}"; done
}

# Exports the settings NAME=VALUE that follow a script. They are meant for nobody else, so names that nobody reads are refused: here,
# and by the trainer, in its check, those that only others read.
variables::take() {
  local -r listed=$'\n'$(<"$REPO_DIR/launch/variables.txt")$'\n'
  local setting name
  for setting in "$@"; do
    name=${setting%%=*}
    [[ $setting =~ ^[A-Za-z][A-Za-z0-9_]*= ]] || log::die "$setting: expected NAME=VALUE"
    [[ $name == "${name^^}" ]] || log::die "$setting: expected NAME=VALUE; did you mean ${name^^}=${setting#*=}?"
    if [[ $listed != *$'\n'"$name"[$' \n']* ]]; then
      variables::check_names "$name" # tells a likely one
      log::die "$name: no such setting"
    fi
    export "${setting?}" GIVEN_NAMES="${GIVEN_NAMES-} $name"
  done
}

# Refuses exported names that look like misspelt settings (BATCHSZIE), and the arguments. Any Python from 3.10 on can check this; on a
# node without one, the trainer's own check does it, in the container and before the first trial.
variables::check_names() {
  local python output
  for python in "${PYTHON:-python}" "$REPO_DIR/.venv/bin/python" python3; do
    output=$(PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR "$python" -B -m bert.core.variables "$@" 2>&1) && return
    if [[ $output == 'run: error: '* ]]; then log::die "${output#run: error: }"; fi
  done
}

# Is a setting that is 0 or 1 switched on, in the trainer's words?
variables::on() {
  local word
  read -r word <<<"${!1:-}" # without spaces around it
  [[ ${word,,} == @(1|true|yes|on) ]]
}

# Prints the variable of the training data that PACKED selects, whose words and default are the trainer's.
variables::data() { if variables::on PACKED; then echo DATADIR_PHASE2_PACKED; else echo DATADIR_PHASE2; fi; }

# Sources the launcher's side of the trainer RANK_MODULE.
variables::trainer() {
  [[ -r $REPO_DIR/launch/run/trainer_${RANK_MODULE:-bert}.sh ]] || log::die "RANK_MODULE=$RANK_MODULE: expected bert or finetune"
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/run/trainer_${RANK_MODULE:-bert}.sh"
}

variables::load() {
  exports::follow
  variables::check_names
  if declare -F trainer::defaults >/dev/null; then trainer::defaults; fi # the doctor has no trainer
  variables::defaults DGXNNODES=1 SPARE_NODES=0 NEXP=1 LOGDIR=results CLEAR_CACHES=1 CHECK_COMPLIANCE=1 MLPERF_RULESET=5.0.0 NCCL_TEST=0 \
    START_TEST=0 NCCL_TEST_MIN_GBPS=0 REHEARSAL=0 POWER=0 BINDING=numa NIC_BINDING=none
  variables::check
  python::choose
  variables::default SUBMISSION_PLATFORM "${DGXNNODES}x${DGXSYSTEM%_*x*x*}"
  export WORLD_SIZE=$((DGXNNODES * DGXNGPU)) LOCAL_WORLD_SIZE=$DGXNGPU
}

variables::check() {
  local name
  [[ ${DGXSYSTEM:-} || ! ${SLURM_EXPORT_ENV:-} || ${SLURM_EXPORT_ENV:-} == ALL* ]] ||
    log::die "sbatch --export=$SLURM_EXPORT_ENV keeps the config's exports from this job: submit without it"
  [[ -n ${DGXSYSTEM:-} && -n ${DGXNGPU:-} ]] ||
    log::die 'DGXSYSTEM or DGXNGPU is not set: source configs/config_<SYSTEM>_....sh first'
  for name in DGXNNODES DGXNGPU NEXP ${WALLTIME_RUNANDTIME:+WALLTIME_RUNANDTIME} ${WALLTIME:+WALLTIME}; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || log::die "$name='${!name}': expected an integer, at least 1"
  done
  [[ $SPARE_NODES =~ ^(0|[1-9][0-9]*)$ ]] || log::die "SPARE_NODES='$SPARE_NODES': expected an integer, at least 0"
  [[ $SPARE_NODES == 0 || ${SLURM_JOB_ID:-} ]] || log::die "SPARE_NODES=$SPARE_NODES is for jobs of Slurm: sbatch run.sub"
  variables::one_of CLEAR_CACHES 0 1 require
  for name in CHECK_COMPLIANCE NCCL_TEST START_TEST REHEARSAL POWER; do variables::one_of "$name" 0 1; done
  [[ $NCCL_TEST_MIN_GBPS =~ ^[0-9]*[.]?[0-9]+$ ]] || log::die "NCCL_TEST_MIN_GBPS='$NCCL_TEST_MIN_GBPS': expected a number"
  variables::one_of BINDING numa exclusive none
  variables::one_of NIC_BINDING nearest none
  [[ ! ${SEED:-} || $SEED =~ ^[0-9]{1,18}$ ]] || log::die "SEED='$SEED': expected an integer of at most 18 digits, or nothing"
  if [[ ${SEED:-} ]]; then export SEED=$((10#$SEED)); fi # the shell takes 010 for 8
}

variables::one_of() {
  local -r name=$1 choices=${*:2}
  [[ " $choices " == *" ${!name} "* ]] || log::die "$name='${!name}': expected one of $choices"
}

# Sets RUN_NAME. That of an earlier run continues it. A rehearsal has a name and checkpoints of its own: the run to come is another.
variables::name_run() {
  export RUN_NAME=${RUN_NAME:-${DGXSYSTEM}_$(date +%Y%m%d-%H%M%S)}
  [[ $RUN_NAME != /* && ! /$RUN_NAME/ =~ /\.{0,2}/ ]] || log::die "RUN_NAME='$RUN_NAME': expected a folder within LOGDIR, without . and .."
  if [[ $REHEARSAL == 1 && $RUN_NAME != *_rehearsal ]]; then RUN_NAME+=_rehearsal; fi
  if [[ $REHEARSAL == 1 && ${CHECKPOINT_DIR:-} && $CHECKPOINT_DIR != */rehearsal ]]; then export CHECKPOINT_DIR+=/rehearsal; fi
}

# Creates and locks the run's folder, LOGDIR/RUN_NAME, which belongs to one kind of run: another would empty its trials. Its .lock
# tells the kind and the last writer.
variables::make_run_dir() {
  local work='' writer=''
  LOGDIR=$(realpath -m -- "$LOGDIR")
  export RUN_DIR=$LOGDIR/$RUN_NAME
  { mkdir -p -- "$RUN_DIR" && exec {lock_file}>>"$RUN_DIR/.lock"; } 2>/dev/null ||
    log::die "LOGDIR=$LOGDIR: cannot write there; choose a folder you can write to"
  read -r work writer <"$RUN_DIR/.lock" || true
  flock -n "$lock_file" ||
    log::die "RUN_NAME=$RUN_NAME: ${writer:-another run} writes to $RUN_DIR: wait for it, end it, or choose another name"
  [[ ! $work || $work == "${RANK_MODULE:-bert}" ]] || log::die "RUN_NAME=$RUN_NAME: $RUN_DIR is of ${work/#bert/pretraining}: choose another name"
  echo "${RANK_MODULE:-bert} process $$ on $(uname -n)${SLURM_JOB_ID:+, job $SLURM_JOB_ID}" >"$RUN_DIR/.lock"
}
