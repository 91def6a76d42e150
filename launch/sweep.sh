#!/usr/bin/env bash
# One run for each combination of settings: scaling studies, hyper-parameters. Each is a job of run.sub, or of run_local.sh.
#   source env.sh; launch/sweep.sh [--local] [--dry-run] CONFIG... [NAME=VALUE,VALUE...]...
#   launch/sweep.sh configs/config_DGXH100_4x8x48x1_pack.sh DGXNNODES=1,2,4                   weak scaling
#   launch/sweep.sh configs/config_DGXH100_4x8x48x1_pack.sh DGXNNODES:GRADIENT_STEPS=1:4,2:2,4:1   the same global batch
#   launch/sweep.sh --local configs/config_demo_1x2x16x1_pack.sh LR=0.005,0.01 SEED=1,2,3
# Names joined by colons change together. All runs go to LOGDIR/sweep_<date>, their checkpoints to folders
# of CHECKPOINT_DIR, if set, by the names of the runs; python -m review compare compares them.
set -euo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly REPO_DIR
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/log run/child run/variables slurm/submit
declare -a configs=() axes=() combinations=('')
local_runs=0 dry=0
declare -i runs=0 failed=0

sweep::arguments() {
  local word
  for word in "$@"; do
    case $word in
      --local) local_runs=1 ;;
      --dry-run) dry=1 ;;
      -h | --help)
        sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit
        ;;
      -*) log::die "sweep: $word: unknown option; expected --local, --dry-run, configs and NAME=VALUE,VALUE" ;;
      *=*) axes+=("$word") ;;
      *) [[ -r $word ]] || log::die "sweep: $word: no such config" && configs+=("$word") ;;
    esac
  done
  ((${#configs[@]})) || log::die 'sweep: no config given: launch/sweep.sh configs/config_....sh NAME=VALUE,VALUE'
}

# Sets combinations: settings NAME=VALUE joined by spaces, one entry per run.
sweep::combine() {
  local axis names values value combination grown i
  local -a next name part
  for axis in "${axes[@]}"; do
    names=${axis%%=*} next=()
    [[ $names =~ ^[A-Z][A-Z0-9_]*(:[A-Z][A-Z0-9_]*)*$ ]] || log::die "sweep: $axis: $names is not the name of a variable"
    IFS=: read -ra name <<<"$names"
    IFS=, read -ra values <<<"${axis#*=}"
    ((${#values[@]})) || log::die "sweep: $axis: no value given"
    for combination in "${combinations[@]}"; do
      for value in "${values[@]}"; do
        IFS=: read -ra part <<<"$value"
        [[ $value =~ ^[A-Za-z0-9_.:/+-]+$ && ${#part[@]} -eq ${#name[@]} ]] ||
          log::die "sweep: $axis: '$value': expected ${#name[@]} value(s) joined by colons"
        grown=$combination
        for i in "${!name[@]}"; do grown+=${grown:+ }${name[i]}=${part[i]}; done
        next+=("$grown")
      done
    done
    combinations=("${next[@]}")
  done
}

# shellcheck disable=SC2329 # child::run calls it
# One run, in a separate subshell. Arguments: config, settings.
sweep::start() {
  local -r config=$1
  local -a settings
  local job
  read -ra settings <<<"$2"
  variables::take "${settings[@]}"
  # Without the config's message that the settings override it.
  # shellcheck source=/dev/null
  source "$config" 2>/dev/null
  RUN_NAME=$DGXSYSTEM${2:+_${2//[ \/]/_}}
  export RUN_NAME=${RUN_NAME//=/-}
  if [[ ${CHECKPOINT_DIR:-} ]]; then export CHECKPOINT_DIR+=/$RUN_NAME; fi
  if ((dry)); then
    echo "$RUN_NAME"
  elif ((local_runs)); then
    exec "$REPO_DIR/run_local.sh"
  else
    job=$(submit::job --parsable --job-name="$RUN_NAME" "$REPO_DIR/run.sub") || exit
    echo "$RUN_NAME: job $job"
  fi
}

sweep::arguments "$@"
sweep::combine
variables::check_names
trap child::end TERM INT HUP QUIT
LOGDIR=${LOGDIR:-results}/sweep_$(date +%Y%m%d-%H%M%S)
export LOGDIR
for config in "${configs[@]}"; do
  for combination in "${combinations[@]}"; do
    runs+=1
    child::run sweep::start "$config" "$combination" && continue
    status=$?
    if [[ $child_ended ]]; then exit "$status"; fi
    failed+=1
  done
done
if ((failed == 0)); then log::info "sweep of $runs runs: $LOGDIR" && exit; fi
# A single one has said why.
if ((runs > 1)); then log::error "$failed of $runs runs failed: $LOGDIR"; fi
exit 1
