#!/usr/bin/env bash
# The user's exports win over env.sh and a config, in any order; exports of a previous config do not, so that sourcing another
# config leaves nothing of the first. Sourced by env.sh, configs/begin.sh and common.sh.
# Each of these files (WHO: SITE is env.sh, CONFIG a config) notes in the variable WHO_EXPORTS what it exported, and from which folders
# it derived paths. What is exported with another value than is noted there is the user's.
#   exports::begin WHO    before a file exports: takes back what is noted, and remembers what is left, the user's
#   exports::restore      gives the user's values back, with a line for each that the file would have changed
#   exports::record WHO   after a file exports: notes it
#   exports::follow       in a run script: moves paths derived from a folder to where that is now

# All by builtins: a config is sourced in every script and in the user's own shell.

# Prints the names of all exported variables except the notes and those of several lines, which no note can hold.
exports::names() {
  local name
  while read -r name; do
    if [[ $name != @(_|*_EXPORTS) && ${!name+set} && ${!name} != *$'\n'* ]]; then echo "$name"; fi
  done < <(compgen -e)
}

# Fills the associative array $2 with what WHO ($1) has noted: the value of NAME, and of :NAME that of a folder.
exports::noted() {
  local -r notes=$1_EXPORTS
  local -n into=$2
  local -a entries
  local entry
  IFS=$'\37' read -ra entries <<<"${!notes-}" # one line: containers and jobs take no others
  # shellcheck disable=SC2034 # of the caller
  for entry in "${entries[@]}"; do into[${entry%%=*}]=${entry#*=}; done
}

exports::begin() {
  local name
  local -A made=() site=()
  exports::noted "$1" made
  # A config may have overridden what env.sh exported.
  if [[ $1 == CONFIG ]]; then exports::noted SITE site; fi
  declare -gA EXPORTS_BEFORE=()
  while read -r name; do
    if [[ ${made[$name]+set} && ${made[$name]} == "${!name}" ]]; then
      unset "$name"
      if [[ ${site[$name]+set} ]]; then export "$name=${site[$name]}"; fi
    fi
    if [[ ${!name+set} ]]; then EXPORTS_BEFORE[$name]=${!name}; fi
  done < <(exports::names)
}

exports::restore() {
  local name mine
  local -A site=()
  exports::noted SITE site
  for name in "${!EXPORTS_BEFORE[@]}"; do
    mine=${EXPORTS_BEFORE[$name]}
    if [[ ${!name+set} && ${!name} == "$mine" || ${site[$name]+set} && ${site[$name]} == "$mine" ]]; then continue; fi
    echo "config: $name=$mine is exported in this shell and overrides '${!name-}' of ${BASH_SOURCE[2]##*/} (unset $name to use that)" >&2
    export "$name=$mine"
  done
}

exports::record() {
  local name notes=''
  while read -r name; do
    if [[ ! ${EXPORTS_BEFORE[$name]+set} || ${EXPORTS_BEFORE[$name]} != "${!name}" ]]; then notes+=$name=${!name}$'\37'; fi
  done < <(exports::names)
  # DATADIR with its default in configs.
  export "$1_EXPORTS=$notes:CHECKPOINTDIR_PHASE1=${CHECKPOINTDIR_PHASE1-}"$'\37'":DATADIR=${DATADIR:-/data/bert}"
  unset EXPORTS_BEFORE
}

exports::follow() {
  local who folder path before
  local -A made
  for who in SITE CONFIG; do
    made=()
    exports::noted "$who" made
    for folder in CHECKPOINTDIR_PHASE1 DATADIR; do # the deepest first
      before=${made[":$folder"]-}
      if [[ ! $before || ${!folder:-$before} == "$before" ]]; then continue; fi # it is where it was
      for path in "${!made[@]}"; do
        # Only what WHO derived and nobody has set since.
        if [[ $path != :* && ${made[$path]} == "$before"/* && ${!path-} == "${made[$path]}" ]]; then
          export "$path=${!folder}${made[$path]#"$before"}"
        fi
      done
    done
  done
}
