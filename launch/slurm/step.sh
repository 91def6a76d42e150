#!/usr/bin/env bash
# srun for a step of this job, tried again while the nodes are not ready. srun itself asks once more only when its --immediate is
# over, which for a node that is lost must not be never; and a controller that was restarted refuses each step with --exclude at once
# ("Memory required by task is not available") until its nodes have answered. Any other error is final, and so is a node that Slurm
# has taken from the job. With LAUNCH_PRINT (run.sub --print) prints srun's line. Usage: step.sh 'NODE...' OPTION... COMMAND...
set -uo pipefail
# shellcheck source=launch/load.sh
source "${BASH_SOURCE[0]%/*}/../load.sh" run/python slurm/job
read -ra nodes <<<"$1"
shift
if [[ ${LAUNCH_PRINT:-} ]]; then
  printf 'srun'
  printf ' %q' "$@"
  echo
  exit
fi
readonly REFUSED=86           # exit status of srun for its own errors
readonly TRY=20 ALL_TRIES=300 # seconds
signalled=''

step::lost() { printf '%s\n' "${nodes[@]}" | grep -qvxF -f <(slurm::nodes); }
step::unknown() { [[ $(sinfo --noheader --states=unknown --nodes="$SLURM_JOB_NODELIST" --format=%N 2>/dev/null) ]]; }

trap 'signalled=1' TERM INT HUP QUIT USR1 # srun gets them too, as all of this process group
while :; do
  begun=$SECONDS status=0
  SLURM_EXIT_ERROR=$REFUSED srun --immediate="$TRY" "$@" || status=$?
  if ((status != REFUSED)); then exit "$status"; fi
  if [[ $signalled ]] || ((SECONDS >= ALL_TRIES)); then exit 1; fi
  if ((SECONDS < begun + TRY - 1)) && ! step::unknown || step::lost; then exit 1; fi
  sleep 1
done
