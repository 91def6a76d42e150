#!/usr/bin/env bash
# Slurm runs this on a node after each task of a run (srun --task-epilog), outside containers, for a few seconds at most. If the
# node of the job's script is lost, the first remaining node requeues the job: nothing else would, since with --no-kill Slurm
# leaves it as it is.
# shellcheck disable=SC2034 # patience is of job.sh
set -uo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
for part in run/log slurm/job slurm/restart; do
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/$part.sh"
done
patience=0 # Slurm limits an epilog to five seconds
if [[ $SLURM_LOCALID != 0 ]]; then exit 0; fi
job=$(slurm::job)
script_node=$(sed -n 's/.* BatchHost=\([^ ]*\).*/\1/p' <<<"$job")
mapfile -t left < <(scontrol show hostnames "$(sed -n 's/.* NodeList=\([^ ]*\).*/\1/p' <<<"$job")")
if [[ " ${left[*]} " == *" $script_node "* || ${SLURMD_NODENAME:-} != "${left[0]}" ]]; then exit 0; fi
restart::clean() { :; }
slurm::choose_nodes() { false; } # no script is left in this job
export RUN_DIR=$LOGDIR/$RUN_NAME
restart::begin "lost by Slurm, with the job's script" "$script_node"
