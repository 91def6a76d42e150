#!/usr/bin/env bash
# What every config ends with: your own exports back in place, then names and times that follow from them.

# Name of the system: config_<DGXSYSTEM>.sh
DGXSYSTEM=$(basename -- "${BASH_SOURCE[1]}" .sh)
export DGXSYSTEM=${DGXSYSTEM#config_}
exports::restore

# Minutes that Slurm grants: each trial, its start and its checks.
export WALLTIME=${WALLTIME:-$((5 + ${NEXP:-1} * (${WALLTIME_RUNANDTIME:?} + 5)))}
export SBATCH_TIMELIMIT=${SBATCH_TIMELIMIT:-$WALLTIME}
exports::record CONFIG
