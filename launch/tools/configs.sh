#!/usr/bin/env bash
# Prints all configs as a table, or the differences between two of them.
#   launch/tools/configs.sh                                    a row for each config
#   launch/tools/configs.sh DGXH100_4x8x48 H100_1x1x48x8_pack  variables in which the two differ; a unique part of a name is enough
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

# The one config whose name is, or contains, the argument.
configs::find() {
  local -a found
  local name=${1##*/}
  name=${name#config_}
  name=${name%.sh}
  if [[ -f configs/config_$name.sh ]]; then
    echo "configs/config_$name.sh"
    return
  fi
  mapfile -t found < <(compgen -G "configs/config_*$name*.sh")
  ((${#found[@]} == 1)) || fail "$1: ${#found[@]} configs have this in their name: ${found[*]##*/config_}"
  echo "${found[0]}"
}

configs::difference() {
  local one other
  one=$(configs::find "$1")
  other=$(configs::find "$2")
  printf '%-28s %-28s %s\n' variable "$(configs::name "$one")" "$(configs::name "$other")"
  awk -F= '{ value = substr($0, length($1) + 2) }
    FNR == NR { of[$1] = value; differs[$1]; other[$1] = "-"; next }
    { other[$1] = value; if (!($1 in of)) of[$1] = "-"; differs[$1] }
    END { for (name in differs) if (of[name] != other[name]) printf "%-28s %-28s %s\n", name, of[name], other[name] }' \
    <(configs::exports "$one") <(configs::exports "$other") | sort
}

case $# in
  0) configs::table ;;
  2) configs::difference "$@" ;;
  *) fail 'expected no argument, or the names of two configs' ;;
esac
