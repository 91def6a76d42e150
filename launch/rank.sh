#!/usr/bin/env bash
# One rank under a launcher (torchrun, srun): run_and_time.sh, and what came of it.
# RUN_DIR/status is the exit status of the first rank that failed, RUN_DIR/error_N.txt its reason in one line.
set -uo pipefail
readonly NUMBER=${RANK:-${SLURM_PROCID:-0}} NOT_REACHED=3

report() {
  local -r status=$1 error=$RUN_DIR/error_${TRIAL:-0}.txt
  local -r who="rank $NUMBER on ${SLURMD_NODENAME:-$(uname -n)}"
  if ((status > 128)); then
    local -r killed="$who was killed by SIG$(kill -l "$status")"
    case $status in
      # Most likely by the launcher, for another rank's sake.
      129 | 130 | 143) (set -o noclobber && echo "$killed" >"$error") ;;
      # Its peers complain of broken connections; this is the cause.
      *) echo "$killed" >"$error" ;;
    esac
  fi
  set -o noclobber
  echo "$status" >"$RUN_DIR/status"
  [[ -s $error ]] || echo "$who ended with exit status $status, see output_${TRIAL:-0}.txt" >"$error"
}

status=0
"$(dirname -- "${BASH_SOURCE[0]}")/../run_and_time.sh" &
trainer=$!
# A launcher that ends this rank because of another one signals this shell, not the trainer.
trap 'kill -TERM "$trainer" 2>/dev/null; wait "$trainer"; exit 143' TERM INT HUP
wait "$trainer" || status=$?
if ((status)) && [[ -n ${RUN_DIR:-} ]]; then
  ((status == NOT_REACHED && NUMBER > 0)) && exit 0 # rank 0 says it for all
  report "$status" 2>/dev/null
  # A complete run short of its target is no crash, which launchers answer with tracebacks and kills.
  if ((status == NOT_REACHED)) && [[ -s $RUN_DIR/status ]]; then status=0; fi
fi
exit "$status"
