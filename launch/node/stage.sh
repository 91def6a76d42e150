#!/usr/bin/env bash
# Copies data to a disk of this node. Usage: stage.sh TARGET NAME=SOURCE...     copies each folder SOURCE to TARGET/NAME
# Every file is read back from the disk and compared by SHA-256 with what was read from the source. Prints
# "staged FILES files, BYTES bytes, sha256 DIGEST", by which nodes are compared. Leaves nothing behind if it fails.
set -euo pipefail
readonly TARGET=$1 WORKERS=8 # files copied at once
shift
NODE=${SLURMD_NODENAME:-$(uname -n)}
readonly NODE

fail() {
  rm -rf -- "$TARGET"
  echo "$NODE: $*" >&2
  exit 1
}

# Arguments: source folder, target folder, file. Prints "DIGEST  FILE".
stage_file() {
  local read written
  mkdir -p -- "$(dirname -- "$2/$3")"
  read=$(tee -- "$2/$3" <"$1/$3" | sha256sum)
  sync -- "$2/$3"
  dd if="$2/$3" iflag=nocache count=0 status=none # so that it is read from the disk
  written=$(sha256sum <"$2/$3")
  [[ $read == "$written" ]] || { echo "$3: the copy differs from what was written" >&2 && exit 255; }
  echo "${read%% *}  ${2##*/}/$3"
}
export -f stage_file

stage_all() {
  local entry
  for entry in "$@"; do
    # shellcheck disable=SC2016 # of the inner shell
    (cd -- "${entry#*=}" && find -L . -type f -printf '%P\0') |
      xargs -0 -r -P "$WORKERS" -I{} bash -euo pipefail -c 'stage_file "$@"' - "${entry#*=}" "$TARGET/${entry%%=*}" {}
  done
}

bytes=0
for entry in "$@"; do
  [[ -d ${entry#*=} && -r ${entry#*=} ]] || fail "${entry%%=*}=${entry#*=}: no such folder here"
  bytes=$((bytes + $(du -sbL -- "${entry#*=}" | cut -f 1)))
done
# A STAGE_DIR that is missing gets a mark, by which cleanup.sh removes it again.
if mkdir -- "${TARGET%/*}" 2>/dev/null; then : >"${TARGET%/*}/.made_for_staging"; fi
{ [[ -d ${TARGET%/*} ]] && mkdir -p -- "$TARGET"; } 2>/dev/null || fail "$TARGET: cannot create this folder"
free=$(df --output=avail -B1 -- "$TARGET" | tail -n 1)
((bytes < free)) || fail "$((bytes >> 20)) MB to stage and $((free >> 20)) MB free in $TARGET"
list=$(stage_all "$@" 2>"$TARGET/.errors") ||
  fail "$(grep -v '^xargs: ' "$TARGET/.errors" | tail -n 1 | grep . || echo 'a copy failed')"
rm -f -- "$TARGET/.errors"
sort -k 2 <<<"$list" >"$TARGET/SHA256SUMS"
echo "staged $(wc -l <<<"$list") files, $bytes bytes, sha256 $(sha256sum <"$TARGET/SHA256SUMS" | cut -d ' ' -f 1)"
