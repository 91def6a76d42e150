#!/usr/bin/env bash
# On one node of a Slurm job: waits until its input or the job ends, and undoes what the run did there (undo.sh). After
# scancel, a requeue or the time limit no step could be started to do it. Usage: guard.sh
set -uo pipefail
UNDO=$(dirname -- "${BASH_SOURCE[0]}")/undo.sh
readonly UNDO

undo() {
  trap '' TERM INT HUP
  exec "$UNDO"
}

trap undo TERM INT HUP
cat <&0 >/dev/null & # bash acts on a signal at once only while it waits
wait "$!"
undo
