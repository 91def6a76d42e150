#!/usr/bin/env bash
# Waits on a node until its input or its job ends, and removes one enroot container of this node. Usage: pyxis_guard.sh NAME
set -uo pipefail
readonly NAME=${1:?name of the container}

remove() {
  trap '' TERM INT HUP
  local container listed
  listed=$(enroot list 2>/dev/null)
  # pyxis puts a prefix before the name: pyxis_ or, where containers end with their job, pyxis_JOB_; old ones put none.
  for container in "$NAME" "pyxis_$NAME" "pyxis_${SLURM_JOB_ID:-}_$NAME"; do
    if grep -qxF -- "$container" <<<"$listed"; then enroot remove --force -- "$container"; fi
  done
  exit 0
}

trap remove TERM INT HUP
cat <&0 >/dev/null & # bash acts on a signal at once only while it waits
wait "$!"
remove
