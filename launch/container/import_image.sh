#!/usr/bin/env bash
# On one node: makes an enroot image of a registry's, once for all jobs that want it. Usage: import_image.sh IMAGE FILE
# FILE.sha256 has its checksum and its image, FILE.lock the lock. A file whose checksum is wrong is imported again.
set -euo pipefail
readonly IMAGE=$1 FILE=$2

fail() {
  echo "CONT_FILE=$FILE: $*" >&2
  exit 1
}

# Is the file there, whole, and made of this image?
import::valid() {
  local digest image
  [[ -s $FILE ]] || return 1
  [[ -s $FILE.sha256 ]] || fail "was not imported by a run: CONT=$FILE takes it as it is, or choose another CONT_FILE"
  read -r digest image <"$FILE.sha256"
  [[ $image == "$IMAGE" ]] || fail "holds $image, not CONT=$IMAGE: choose another file, or remove it"
  [[ $(sha256sum <"$FILE") == "$digest  -" ]] && return
  echo "CONT_FILE=$FILE: its checksum is wrong: importing it again" >&2
  return 1
}

import::make() {
  local -r new=$FILE.new
  rm -f -- "$new"
  # shellcheck disable=SC2064 # the name of now
  trap "rm -f -- '$new' '$new.sha256'" EXIT
  enroot import --output "$new" "docker://$IMAGE" </dev/null
  [[ -s $new ]] || fail "enroot import made nothing"
  sync -- "$new"
  echo "$(sha256sum <"$new" | cut -d ' ' -f 1) $IMAGE" >"$new.sha256"
  mv -f -- "$new.sha256" "$FILE.sha256"
  mv -f -- "$new" "$FILE"
}

{ exec {lock}>>"$FILE.lock"; } 2>/dev/null || fail 'cannot write there: a folder on storage of all nodes'
if ! flock -n "$lock"; then
  echo "CONT_FILE=$FILE: another job imports it; waiting" >&2
  flock "$lock"
fi
import::valid || import::make
