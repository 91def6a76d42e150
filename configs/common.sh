#!/usr/bin/env bash
# What every config ends with: names and times that follow from it. Exports only.

# Name of the system: config_<DGXSYSTEM>.sh
DGXSYSTEM=$(basename -- "${BASH_SOURCE[1]}" .sh)
export DGXSYSTEM=${DGXSYSTEM#config_}

# Minutes that Slurm grants: each trial, its start and its checks.
export WALLTIME=$((5 + ${NEXP:-1} * (${WALLTIME_RUNANDTIME:?} + 5)))
export SBATCH_TIMELIMIT=$WALLTIME
