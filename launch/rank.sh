#!/usr/bin/env bash
# One rank under a launcher: run_and_time.sh, and where it dies without a reason, the reason.
# RUN_DIR/status is the exit status of the first rank that failed, RUN_DIR/error_N.txt its reason in one line.
set -uo pipefail
readonly RANK_NAME="rank ${RANK:-${SLURM_PROCID:-0}} on ${SLURMD_NODENAME:-$(uname -n)}"
status=0
"$(dirname "${BASH_SOURCE[0]}")/../run_and_time.sh" || status=$?
if ((status)) && [[ -n ${RUN_DIR:-} ]]; then
  error=$RUN_DIR/error_${TRIAL:-0}.txt
  {
    if ((status > 128)); then # Its peers report broken connections; this is the cause.
      echo "$RANK_NAME was killed by SIG$(kill -l "$status")" >"$error"
    fi
    set -o noclobber
    echo "$status" >"$RUN_DIR/status"
    [[ -s $error ]] || echo "$RANK_NAME ended with exit status $status, see output_${TRIAL:-0}.txt" >"$error"
  } 2>/dev/null
fi
exit "$status"
