#!/usr/bin/env bash
# Your own exports win over env.sh and a config, whatever the order; exports of a config sourced before do not, so that one
# config after another leaves nothing of the first. Sourced by env.sh, configs/begin.sh and common.sh.
#   exports::begin WHO    before a file exports; WHO is SITE (env.sh) or CONFIG
#   exports::restore      gives back what was the user's, and says so
#   exports::record WHO   after it: WHO_EXPORTS keeps NAME=VALUE of all that the file exported, to be known again
EXPORTS_SEPARATOR=$'\x1f'

# Prints NAME=VALUE of all exported variables but the two records, and without values of several lines.
exports::list() {
  local name
  for name in $(compgen -e); do
    if [[ $name != *_EXPORTS && ${!name-} != *$'\n'* ]]; then printf '%s=%s\n' "$name" "${!name-}"; fi
  done
}

# Whether the files of WHO ($1) exported NAME=VALUE ($2).
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
      # Where a config had taken the place of env.sh's value, that value is back.
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
      echo "config: $entry is exported in this shell and stands; ${BASH_SOURCE[2]##*/} has '${!name-}' (unset $name to take it)" >&2
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
