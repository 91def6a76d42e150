#!/usr/bin/env bash
# On one node: imports a registry's image as an enroot image, once for all jobs. Usage: import_image.sh IMAGE FILE
# FILE.sha256 holds checksum and image name, FILE.lock is the lock. A file with a wrong checksum is imported again.
set -euo pipefail
readonly IMAGE=$1 FILE=$2

fail() {
  echo "CONT_FILE=$FILE: $*" >&2
  exit 1
}

# Does the file exist, complete and from this image?
import::valid() {
  local digest image
  [[ -s $FILE ]] || return 1
  [[ -s $FILE.sha256 ]] || fail "was not imported by a run: use it as it is with CONT=$FILE, or choose another CONT_FILE"
  read -r digest image <"$FILE.sha256"
  [[ $image == "$IMAGE" ]] || fail "holds $image, not CONT=$IMAGE: choose another file, or remove it"
  [[ $(sha256sum <"$FILE") == "$digest  -" ]] && return
  echo "CONT_FILE=$FILE: its checksum is wrong: importing it again" >&2
  return 1
}

import::make() {
  local -r new=$FILE.new
  rm -f -- "$new"
  # shellcheck disable=SC2064 # expand now
  trap "rm -f -- '$new' '$new.sha256'" EXIT
  enroot import --output "$new" "docker://$IMAGE" </dev/null
  [[ -s $new ]] || fail "enroot import wrote nothing"
  sync -- "$new"
  echo "$(sha256sum <"$new" | cut -d ' ' -f 1) $IMAGE" >"$new.sha256"
  mv -f -- "$new.sha256" "$FILE.sha256"
  mv -f -- "$new" "$FILE"
}

{ exec {lock}>>"$FILE.lock"; } 2>/dev/null || fail 'cannot write there: choose a folder on storage that all nodes share'
if ! flock -n "$lock"; then
  echo "CONT_FILE=$FILE: another job is importing it; waiting" >&2
  flock "$lock"
fi
import::valid || import::make
