#!/usr/bin/env bash
# On one node of a job, outside containers, from before the first attempt to the end: undoes what the job did to the node when Slurm
# ends the job, since no step can be started for that any more, and has the job requeued if Slurm loses the node of its script, in
# whatever phase: with --no-kill nobody else would. Started by slurm/supervisor.sh, one a node, in the order of the nodes.
set -uo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
readonly REPO_DIR
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/log run/python run/restart slurm/job slurm/requeue
readonly INTERVAL=20 # seconds between two looks of the first node that may have to act
readonly ASKING=8    # nodes that look, each more rarely than the one before it, so that the controller is not asked by all at once

guard::undo() {
  trap '' TERM INT HUP
  "$REPO_DIR/launch/node/cleanup.sh" now
}

# The first node that is left acts, for all.
guard::look() {
  local -r job=$(slurm::job)
  local -r script_node=$(sed -n 's/.* BatchHost=\([^ ]*\).*/\1/p' <<<"$job")
  local -a left
  mapfile -t left < <(scontrol show hostnames "$(sed -n 's/.* NodeList=\([^ ]*\).*/\1/p' <<<"$job")" 2>/dev/null)
  if [[ ! $script_node || ${#left[@]} -eq 0 || " ${left[*]} " == *" $script_node "* ]]; then return; fi
  if [[ ${left[0]} != "${SLURMD_NODENAME:-}" ]]; then return; fi
  # The restart must end the job even if it may not run again: it has no script any more.
  if restart::allowed "$RESTARTS" >/dev/null; then
    requeue::job "$(restart::note "lost by Slurm, with the job's script" "$script_node")"
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
