#!/usr/bin/env bash
# One run for each combination of settings: scaling studies, hyper-parameters. Each is a job of run.sub, or of run_local.sh.
#   source env.sh; launch/sweep.sh [--local] [--dry-run] CONFIG... [NAME=VALUE,VALUE...]...
#   launch/sweep.sh configs/config_DGXH100_4x8x48x1_pack.sh DGXNNODES=1,2,4                   weak scaling
#   launch/sweep.sh configs/config_DGXH100_4x8x48x1_pack.sh DGXNNODES:GRADIENT_STEPS=1:4,2:2,4:1   the same global batch
#   launch/sweep.sh --local configs/config_demo_1x2x16x1_pack.sh LR=0.005,0.01 SEED=1,2,3
# Names joined by colons change together. All runs go to LOGDIR/sweep_<date>, their checkpoints to folders
# of CHECKPOINT_DIR, if set, by the names of the runs; python -m review compare compares them.
set -euo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/load.sh" run/log run/child run/variables slurm/submit
declare -i failed=0

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
  if [[ $OPTIONS == *' --dry-run '* ]]; then
    echo "$RUN_NAME"
  elif [[ $OPTIONS == *' --local '* ]]; then
    exec "$REPO_DIR/run_local.sh"
  else
    job=$(submit::job --parsable --job-name="$RUN_NAME" "$REPO_DIR/run.sub") || exit
    echo "$RUN_NAME: job $job"
  fi
}

readonly OPTIONS=" $* "
if [[ $OPTIONS =~ ' '(-h|--help)' ' ]]; then sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit; fi
plan=$(python::host "$REPO_DIR/launch/sweep.py" "$@") || exit 2
mapfile -t runs <<<"$plan"
variables::check_names
trap child::end TERM INT HUP QUIT
LOGDIR=${LOGDIR:-results}/sweep_$(date +%Y%m%d-%H%M%S)
export LOGDIR
for run in "${runs[@]}"; do
  child::run sweep::start "${run%%$'\t'*}" "${run#*$'\t'}" && continue
  status=$?
  if [[ $child_ended ]]; then exit "$status"; fi
  failed+=1
done
if ((failed == 0)); then log::info "sweep of ${#runs[@]} runs: $LOGDIR" && exit; fi
# A single one has said why.
if ((${#runs[@]} > 1)); then log::error "$failed of ${#runs[@]} runs failed: $LOGDIR"; fi
exit 1
