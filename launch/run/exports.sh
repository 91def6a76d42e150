#!/usr/bin/env bash
# The user's exports win over env.sh and a config, in any order; exports of a previous config do not, so that sourcing another
# config leaves nothing of the first. Sourced by env.sh, configs/begin.sh and common.sh.
#   exports::begin WHO    before a file exports; WHO is SITE (env.sh) or CONFIG
#   exports::restore      restores and reports the user's values
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
