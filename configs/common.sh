#!/usr/bin/env bash
# Last line of every config: restores your own exports, then derives names and times from them.

# Name of the system: config_<DGXSYSTEM>.sh
DGXSYSTEM=${BASH_SOURCE[1]##*/}
DGXSYSTEM=${DGXSYSTEM%.sh}
export DGXSYSTEM=${DGXSYSTEM#config_}
exports::restore

# Minutes of the Slurm job: the trials, their start-up and checks.
export WALLTIME=${WALLTIME:-$((5 + ${NEXP:-1} * (${WALLTIME_RUNANDTIME:?} + 5)))}
export SBATCH_TIMELIMIT=${SBATCH_TIMELIMIT:-$WALLTIME}
exports::record CONFIG
