#!/usr/bin/env bash
# The user's exports win over env.sh and a config, in any order; exports of a previous config do not, so that sourcing another
# config leaves nothing of the first. Sourced by env.sh, configs/begin.sh and common.sh.
# Each of these files (WHO: SITE is env.sh, CONFIG a config) notes in the variable WHO_EXPORTS what it exported, as NAME=VALUE entries that
# each end in a separator. What is exported with another value than is noted there is the user's.
#   exports::begin WHO    before a file exports: takes back what is noted, and remembers what is left, the user's
#   exports::restore      gives the user's values back, with a line for each that the file would have changed
#   exports::record WHO   after a file exports: notes it
#   exports::record_roots WHO NAME...  notes these folders, from which WHO derived other paths, in WHO_ROOT_EXPORTS
#   exports::follow       in a run script: moves such paths to where the folders are now
EXPORTS_SEPARATOR=$'\x1f'

# Prints NAME=VALUE of all exported variables except the notes and multi-line values.
exports::list() {
  local name
  for name in $(compgen -e); do
    if [[ $name != *_EXPORTS && ${!name-} != *$'\n'* ]]; then printf '%s=%s\n' "$name" "${!name-}"; fi
  done
}

# Has WHO ($1) noted NAME=VALUE ($2)?
exports::recorded() {
  local -r noted=$1_EXPORTS
  [[ $EXPORTS_SEPARATOR${!noted-} == *"$EXPORTS_SEPARATOR$2$EXPORTS_SEPARATOR"* ]]
}

exports::begin() {
  local entry name site
  local -a sites=()
  # A config may have overridden what env.sh exported.
  if [[ $1 == CONFIG ]]; then IFS=$EXPORTS_SEPARATOR read -ra sites <<<"${SITE_EXPORTS-}"; fi
  while IFS= read -r entry; do
    if ! exports::recorded "$1" "$entry"; then continue; fi
    name=${entry%%=*}
    unset "$name"
    for site in "${sites[@]}"; do if [[ $site == "$name="* ]]; then export "${site?}"; fi; done
  done < <(exports::list)
  EXPORTS_BEFORE=$(exports::list)
}

exports::restore() {
  local entry name
  while IFS= read -r entry; do
    name=${entry%%=*}
    if [[ $name && ${!name-} != "${entry#*=}" ]] && ! exports::recorded SITE "$entry"; then
      echo "config: $entry is exported in this shell and overrides '${!name-}' of ${BASH_SOURCE[2]##*/} (unset $name to use that)" >&2
      export "${entry?}"
    fi
  done <<<"$EXPORTS_BEFORE"
}

exports::record() {
  local entry made=''
  while IFS= read -r entry; do
    if [[ $'\n'$EXPORTS_BEFORE$'\n' != *$'\n'"$entry"$'\n'* ]]; then made+=$entry$EXPORTS_SEPARATOR; fi
  done < <(exports::list)
  export "$1_EXPORTS=$made"
  unset EXPORTS_BEFORE
}

exports::record_roots() {
  local name noted=''
  for name in "${@:2}"; do noted+=$name=${!name:-/data/bert}$EXPORTS_SEPARATOR; done # the default of DATADIR in configs
  export "$1_ROOT_EXPORTS=$noted"
}

exports::follow() {
  local who root entry name before path
  local -a roots entries
  for who in SITE CONFIG; do
    path=${who}_ROOT_EXPORTS
    IFS=$EXPORTS_SEPARATOR read -ra roots <<<"${!path-}"
    path=${who}_EXPORTS
    IFS=$EXPORTS_SEPARATOR read -ra entries <<<"${!path-}"
    for root in "${roots[@]}"; do
      name=${root%%=*} before=${root#*=}
      if [[ ! ${!name:-} || ${!name} == "$before" ]]; then continue; fi # it is where it was
      for entry in "${entries[@]}"; do
        path=${entry%%=*}
        # Only what WHO derived and nobody has set since.
        if [[ ${entry#*=} == "$before"/* && ${!path-} == "${entry#*=}" ]]; then
          export "$path=${!name}${entry#*="$before"}"
        fi
      done
    done
  done
}
