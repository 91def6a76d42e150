#!/usr/bin/env bash
# On one node: undoes what a run did there, by the variables that said so: GPU_CLOCKS, STAGED (a folder), PYXIS_NAME (a
# container). What was not done, or is undone already, is left alone. Usage: undo.sh
set -uo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly REPO_DIR
# shellcheck source=launch/enroot.sh
source "$REPO_DIR/launch/enroot.sh"
trap '' TERM INT HUP

if [[ ${GPU_CLOCKS:-} ]]; then "$REPO_DIR/launch/clocks.sh" reset; fi
if [[ ${STAGED:-} == */bert_* ]]; then rm -rf -- "$STAGED"; fi
if [[ ${PYXIS_NAME:-} ]]; then
  # pyxis puts a prefix before the name: pyxis_ or, where containers end with their job, pyxis_JOB_; old ones put none.
  enroot::list | grep -xE "(pyxis_)?(${SLURM_JOB_ID:-}_)?$PYXIS_NAME" | enroot::remove
fi
exit 0
