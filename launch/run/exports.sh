#!/usr/bin/env bash
# The user's exports win over env.sh and a config, in any order; exports of a previous config do not, so that sourcing another
# config leaves nothing of the first. Sourced by env.sh, configs/begin.sh and common.sh.
# Each of these files (WHO: SITE is env.sh, CONFIG a config) notes in the variable WHO_EXPORTS what it exported, and from which folders
# it derived paths. What is exported with another value than is noted there is the user's.
#   exports::begin WHO    before a file exports: takes back what is noted, and remembers what is left, the user's
#   exports::restore      gives the user's values back, with a line for each that the file would have changed
#   exports::record WHO   after a file exports: notes it
#   exports::follow       in a run script: moves paths derived from a folder to where that is now

# Prints NAME=VALUE of all exported variables except the notes and multi-line values.
exports::list() {
  local name
  # By the shell alone: three programs take as long as all else of sourcing a config.
  while IFS= read -r name; do
    if [[ $name != *_EXPORTS && $name != _ && -v $name && ${!name} != *$'\n'* ]]; then printf '%s\n' "$name=${!name}"; fi
  done < <(compgen -e)
}

# Prints what WHO ($1) has noted: NAME=VALUE, and :NAME=VALUE of a folder.
exports::noted() {
  local -r notes=$1_EXPORTS
  local -r told=${!notes-} # one line: containers and jobs take no others
  printf '%s\n' "${told//$'\37'/$'\n'}"
}

exports::begin() {
  local entry
  while IFS= read -r entry; do
    unset "${entry%%=*}"
    # A config may have overridden what env.sh exported.
    if [[ $1 == CONFIG ]] && entry=$(exports::noted SITE | grep -a "^${entry%%=*}="); then export "${entry?}"; fi
  done < <(exports::list | grep -axF -f <(exports::noted "$1"))
  EXPORTS_BEFORE=$(exports::list)
}

exports::restore() {
  local entry name
  while IFS= read -r entry; do
    name=${entry%%=*}
    echo "config: $entry is exported in this shell and overrides '${!name-}' of ${BASH_SOURCE[2]##*/} (unset $name to use that)" >&2
    export "${entry?}"
  done < <(grep -avxF -f <(exports::list && exports::noted SITE) <<<"$EXPORTS_BEFORE")
}

exports::record() {
  local made
  made=$(exports::list | grep -avxF -f <(echo "$EXPORTS_BEFORE")) || true
  # The deepest folder first; DATADIR with its default in configs.
  made+=$'\n':CHECKPOINTDIR_PHASE1=${CHECKPOINTDIR_PHASE1-}$'\n':DATADIR=${DATADIR:-/data/bert}
  export "$1_EXPORTS=${made//$'\n'/$'\37'}"
  unset EXPORTS_BEFORE
}

exports::follow() {
  local who name before path value
  for who in SITE CONFIG; do
    while IFS='=' read -r name before; do
      name=${name#:}
      if [[ ! $before || ${!name:-$before} == "$before" ]]; then continue; fi # it is where it was
      # Only what WHO derived and nobody has set since.
      while IFS='=' read -r path value; do
        if [[ $value == "$before"/* ]]; then export "$path=${!name}${value#"$before"}"; fi
      done < <(exports::list | grep -axF -f <(exports::noted "$who"))
    done < <(exports::noted "$who" | grep -a '^:')
  done
}
