#!/usr/bin/env bash
# Prints all configs as a table, or the differences between two of them.
#   launch/tools/configs.sh                                                    a row for each config
#   launch/tools/configs.sh DGXH100_4x8x48x1_pack DGXH100_1x8x48x1_pack        variables in which the two differ
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

fail() {
  echo "configs: error: $*" >&2
  exit 2
}

# Prints NAME=VALUE of all that a config exports, sourced in an empty environment.
configs::exports() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  env -i PATH="$PATH" bash -euc 'source "$1"; compgen -e | while read -r name; do
    case $name in PATH | PWD | OLDPWD | SHLVL | _ | *_EXPORTS) ;; *) printf "%s=%s\n" "$name" "${!name}" ;; esac
  done' - "$1"
}

configs::table() {
  local file nodes gpus rows steps kind
  local -A value
  printf '%-50s %7s %5s  %-18s %7s %12s %8s %10s\n' config nodes GPUs 'rows per GPU' batch LR steps division
  for file in configs/config_*.sh; do
    value=([SUBMISSION_DIVISION]=closed)
    while IFS='=' read -r name text; do value[$name]=$text; done < <(configs::exports "$file")
    nodes=${value[DGXNNODES]} gpus=${value[DGXNGPU]} rows=${value[BATCHSIZE]} steps=${value[GRADIENT_STEPS]}
    kind=$([[ ${value[PACKED]} == 1 ]] && echo packed || echo unpacked)
    printf '%-50s %7d %5d  %-18s %7d %12s %8d %10s\n' "$(configs::name "$file")" "$nodes" "$gpus" "$rows x $steps $kind" \
      $((nodes * gpus * rows * steps * value[PACKING_FACTOR])) "$(printf '%.6g' "${value[LR]}")" "${value[MAX_STEPS]}" \
      "${value[SUBMISSION_DIVISION]}"
  done
}

configs::name() { basename -- "$1" .sh | sed 's/^config_//'; }

# The file of a name, with or without config_ and .sh.
configs::file() {
  local name=${1##*/}
  name=configs/config_${name#config_}
  [[ -f ${name%.sh}.sh ]] || fail "$1: no such config; make configs lists them"
  echo "${name%.sh}.sh"
}

# NAME=VALUE lines in which the two differ, as of diff.
configs::difference() {
  local one other
  one=$(configs::file "$1")
  other=$(configs::file "$2")
  diff --unified=0 --label "$1" --label "$2" <(configs::exports "$one" | sort) <(configs::exports "$other" | sort) | grep -v '^@@' || true
}

case $# in
  0) configs::table ;;
  2) configs::difference "$@" ;;
  *) fail 'expected no argument, or the names of two configs' ;;
esac
