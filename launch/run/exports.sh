#!/usr/bin/env bash
# The user's exports win over env.sh and a config, in any order; exports of a previous config do not, so that sourcing another
# config leaves nothing of the first. Sourced by env.sh, configs/begin.sh and common.sh.
#   exports::begin WHO    before a file exports; WHO is SITE (env.sh) or CONFIG
#   exports::restore      restores and reports the user's values
#   exports::record_roots NAME...  saves what these folders were when the paths below them were derived
#   exports::follow       in a run script: moves such paths to where the folders are now
#   exports::record WHO   after a file exports: saves NAME=VALUE of all its exports in WHO_EXPORTS
EXPORTS_SEPARATOR=$'\x1f'

# Prints NAME=VALUE of all exported variables except the two records and multi-line values.
exports::list() {
  local name
  for name in $(compgen -e); do
    if [[ $name != *_EXPORTS && ${!name-} != *$'\n'* ]]; then printf '%s=%s\n' "$name" "${!name-}"; fi
  done
}

# Did WHO ($1) export NAME=VALUE ($2)?
exports::recorded() {
  local -r record=$1_EXPORTS
  [[ $EXPORTS_SEPARATOR${!record-} == *"$EXPORTS_SEPARATOR$2$EXPORTS_SEPARATOR"* ]]
}

exports::begin() {
  local entry name
  local -r site=$EXPORTS_SEPARATOR${SITE_EXPORTS-}
  while IFS= read -r entry; do
    name=${entry%%=*}
    if exports::recorded "$1" "$entry"; then
      unset "$name"
      # Restores env.sh's value if a config had overridden it.
      if [[ $1 == CONFIG && $site == *"$EXPORTS_SEPARATOR$name="* ]]; then
        entry=${site#*"$EXPORTS_SEPARATOR$name="}
        export "$name=${entry%%"$EXPORTS_SEPARATOR"*}"
      fi
    fi
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
  local name
  ROOT_EXPORTS=$EXPORTS_SEPARATOR
  for name in "$@"; do ROOT_EXPORTS+=$name=${!name}$EXPORTS_SEPARATOR; done
  export ROOT_EXPORTS
}

# A path that env.sh derived, and nobody set since, follows its folder to where that was exported afterwards.
exports::follow() {
  local root entry name before
  local -a roots entries
  IFS=$EXPORTS_SEPARATOR read -ra roots <<<"${ROOT_EXPORTS-}"
  IFS=$EXPORTS_SEPARATOR read -ra entries <<<"${SITE_EXPORTS-}"
  for root in "${roots[@]}"; do
    name=${root%%=*} before=${root#*=}
    if [[ ! $name || ${!name:-} == "$before" || ! ${!name:-} ]]; then continue; fi
    for entry in "${entries[@]}"; do
      if [[ ${entry#*=} == "$before"/* && $(exports::value "${entry%%=*}") == "${entry#*=}" ]]; then
        export "${entry%%=*}=${!name}${entry#*="$before"}"
      fi
    done
  done
}

exports::value() { printf '%s' "${!1-}"; }
