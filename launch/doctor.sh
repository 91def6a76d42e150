#!/usr/bin/env bash
# Is this site ready for the run scripts? Prints pass, warn, fail or skip for each check, and the command that fixes a failure.
#   source env.sh; source configs/config_<SYSTEM>_....sh; launch/doctor.sh
# Without a config, checks that need one are skipped.
# usage: doctor.sh [help] [slurm] [machine] [gpu] [data] [verify]     default: all except verify
# On the compute nodes: srun --nodes=2 --ntasks-per-node=1 launch/doctor.sh machine gpu data
# Exit status: 0 if nothing failed, 1 if something did, 2 for wrong usage.
set -uo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/load.sh" run/log run/variables

if [[ ${1:-} == --settings ]]; then # the run scripts' own check, for doctor.py
  if [[ ${DGXSYSTEM:-} && ${DGXNGPU:-} ]]; then variables::load; else variables::check_names; fi
  exit
fi
if [[ " $* " =~ ' '(help|--help|-h)' ' ]]; then sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit; fi
# shellcheck source=env.sh
if [[ -z ${EVALDIR:-} ]]; then source "$REPO_DIR/env.sh"; fi
exports::follow
CONTAINER_RUNTIME=none python::choose # this machine's
python::require_host
python::host "$REPO_DIR/launch/doctor.py" "$@"
