#!/usr/bin/env bash
# On one node, before a run: removes what jobs of this user left there because the node lost its power, or because Slurm's
# KillWait cut the removal short: containers, and folders of staged data. Only of jobs that Slurm no longer knows, and of
# earlier starts of this one. Usage: leftovers.sh
set -uo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly REPO_DIR
# shellcheck source=launch/enroot.sh
source "$REPO_DIR/launch/enroot.sh"

# Of the names on stdin, those of jobs that are over. Each ends in bert_JOB_RESTART.
leftovers::dead() {
  local -a names
  local name job restart known
  mapfile -t names < <(grep -E '(^|_|/)bert_[0-9]+_[0-9]+$')
  if ((${#names[@]} == 0)); then return; fi
  # Asked after the names were listed, so that no job may have begun in between; without an answer nothing is removed.
  known=$(squeue --noheader --format=%A 2>/dev/null) || return
  for name in "${names[@]}"; do
    IFS=_ read -r job restart <<<"${name##*bert_}"
    if [[ $job == "${SLURM_JOB_ID:-}" ]]; then
      if ((restart < ${SLURM_RESTART_COUNT:-0})); then echo "$name"; fi
    elif ! grep -qxF -- "$job" <<<"$known"; then
      echo "$name"
    fi
  done
}

enroot::list | leftovers::dead | enroot::remove
if [[ ${STAGE_DIR:-} ]]; then
  find "$STAGE_DIR" -mindepth 1 -maxdepth 1 -type d -user "$(id -u)" -name 'bert_*' 2>/dev/null |
    leftovers::dead | xargs -r -d '\n' rm -rf --
fi
exit 0
