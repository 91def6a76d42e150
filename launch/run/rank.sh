#!/usr/bin/env bash
# One rank under a launcher (torchrun, srun): runs run_and_time.sh and reports its failure: RUN_DIR/status gets the record of the
# first rank that failed, RUN_DIR/error_N.txt its reason in one line.
set -uo pipefail
# shellcheck source=launch/run/child.sh
source "${BASH_SOURCE[0]%/*}/child.sh"
readonly NUMBER=${RANK:-${SLURM_PROCID:-0}} NOT_REACHED=3

report() {
  "${PYTHON:-python}" -B -s -S "${BASH_SOURCE[0]%/*}/records.py" explain "$RUN_DIR" "${TRIAL:-0}" \
    "$1" "$NUMBER" "${SLURMD_NODENAME:-$(uname -n)}"
}

# Every shard and connection needs a file descriptor; many systems have a soft limit of 1024. Never fails.
raise_open_files() { ulimit -Sn 1048576 || ulimit -Sn hard; }

# Prefixes each line of output with the rank, if there are several.
label() {
  trap '' TERM INT HUP USR1 # so that the rank's last lines are shown too
  exec sed -u "s/^/$NUMBER: /" 3>&-
}

# Waits for the last lines, but not for an orphan of the trainer that keeps its output open.
# shellcheck disable=SC2329 # a trap calls it
end_label() {
  local i
  exec >&3 2>&3
  for ((i = 0; i < 100; i++)); do
    kill -0 "$labeller" 2>/dev/null || break
    sleep 0.02
  done
}

raise_open_files 2>/dev/null
exec 3>&1
if ((${WORLD_SIZE:-${SLURM_NTASKS:-1}} > 1)); then
  exec > >(label) 2>&1
  labeller=$!
  trap end_label EXIT
fi
# A launcher that ends this rank because of another one signals this shell, not the trainer.
trap child::end TERM INT HUP USR1
# torchrun starts each rank in a new session, so a signal that kills torchrun does not reach it: the trainer ends with torchrun.
child_starter=$PPID status=0
child::run "${BASH_SOURCE[0]%/*}/../../run_and_time.sh" 3>&- || status=$?
if [[ $child_ended ]]; then exit 143; fi
if ((status)) && [[ -n ${RUN_DIR:-} ]]; then
  ((status == NOT_REACHED && NUMBER > 0)) && exit 0 # rank 0 reports it for all
  report "$status" 2>/dev/null
  # A complete run that missed its target is not a crash, to which launchers react with tracebacks and kills.
  if ((status == NOT_REACHED)) && [[ -s $RUN_DIR/status ]]; then status=0; fi
fi
exit "$status"
