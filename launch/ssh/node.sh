#!/usr/bin/env bash
# One machine of run_multinode.sh, started over ssh. Reads the variables of the run from stdin, then runs a command.
#   node.sh run COMMAND...     becomes that command
#   node.sh watch COMMAND...   ends it when stdin ends, that is when the connection or its other end is gone. All output goes
#                              to stderr; stdout gets the record of the rank that failed first
set -uo pipefail
# shellcheck source=launch/load.sh
source "${BASH_SOURCE[0]%/*}/../load.sh" run/environment run/child node/binding

environment::read
readonly MODE=$1
shift
if [[ $MODE == run ]]; then exec "$@" </dev/null; fi

# A machine that does not share LOGDIR gets a temporary folder, just for the reason of a failure.
own=''
if [[ ! -d $RUN_DIR ]]; then own=$RUN_DIR && mkdir -p -- "$RUN_DIR"; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(binding::threads "$DGXNGPU")}

set -m # a separate process group, to be ended as a whole
"$@" >&2 </dev/null &
readonly COMMAND=$!
(
  cat >/dev/null
  child::stop "$COMMAND" 40
) <&0 &
readonly WATCH=$!
set +m
status=0
wait "$COMMAND" || status=$?
kill -TERM -- "-$WATCH" 2>/dev/null
if ((status)) && [[ -s $RUN_DIR/status ]]; then cat -- "$RUN_DIR/status"; fi
# The names of NCCL's dumps, which tell who did not reach a collective.
if [[ $own ]]; then (cd -- "$RUN_DIR" && compgen -G 'nccl_*_rank_*'); fi
if [[ $own ]]; then rm -rf -- "$own" && rmdir -p --ignore-fail-on-non-empty -- "$(dirname -- "$own")" 2>/dev/null; fi
exit "$status"
