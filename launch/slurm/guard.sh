#!/usr/bin/env bash
# On one node of a job, outside containers, from before the first attempt to the end: undoes what the job did to the node when Slurm
# ends the job, since no step can be started for that any more, and has the job requeued if Slurm loses the node of its script, in
# whatever phase: with --no-kill nobody else would. Started by slurm/supervisor.sh, one a node, in the order of the nodes.
set -uo pipefail
# shellcheck source=launch/load.sh
source "${BASH_SOURCE[0]%/*}/../load.sh" run/log run/python run/restart slurm/job slurm/requeue
readonly INTERVAL=20 # seconds between two looks of the first node that may have to act
readonly ASKING=8    # nodes that look, each more rarely than the one before it, so that the controller is not asked by all at once

guard::undo() {
  trap '' TERM INT HUP
  "$REPO_DIR/launch/node/cleanup.sh" now
}

# The first node that is left acts, for all.
guard::look() {
  local -r lost=$(slurm::ask orphaned "${SLURMD_NODENAME:-}")
  if [[ ! $lost ]]; then return; fi
  # The restart must end the job even if it may not run again: it has no script any more.
  if restart::ask allowed >/dev/null; then
    requeue::job "$(restart::ask note "lost by Slurm, with the job's script" "$lost")"
  fi
  scancel "$SLURM_JOB"
}

trap guard::undo EXIT
trap 'exit 0' TERM INT HUP
while :; do
  sleep "$((INTERVAL * (SLURM_PROCID + 1)))" &
  wait "$!" # which a signal ends at once
  if ((SLURM_PROCID < ASKING)); then guard::look; fi
done
