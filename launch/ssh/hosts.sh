#!/usr/bin/env bash
# The machines of run_multinode.sh, and its settings under the names of Samsung's script.

declare -a slots=()

hosts::load() {
  local -r config=$REPO_DIR/configs/config_${DGXSYSTEM:-}.sh
  if [[ -n ${HOSTS:-} ]]; then
    read -ra hosts <<<"${HOSTS//,/ }"
  elif [[ -n ${HOSTFILE:-} ]]; then
    hosts::read "$HOSTFILE"
  fi
  # Where no config was sourced DGXSYSTEM names one, over which exports win; or else it is only a name.
  if [[ -n ${DGXSYSTEM:-} && -z ${CONFIG_EXPORTS:-} ]]; then
    if [[ -f $config ]]; then
      # shellcheck source=/dev/null
      source "$config"
    elif [[ -z ${BATCHSIZE:-} ]]; then
      log::die "DGXSYSTEM=$DGXSYSTEM: no such config: $config"
    fi
  fi
  if [[ -n ${INPUT_DIR:-} ]]; then export "$(variables::data)=$INPUT_DIR"; fi
  if [[ -n ${EVAL_DIR:-} ]]; then export EVALDIR=$EVAL_DIR; fi
  if [[ -n ${CHECKPOINTDIR_PHASE1:-} && -z ${INIT_CHECKPOINT+x} ]]; then
    export INIT_CHECKPOINT=$CHECKPOINTDIR_PHASE1/model.ckpt-28252.pt
  fi
}

# Reads a hostfile in DeepSpeed's format: lines "node1 slots=8", rank 0 first; comments begin with #.
hosts::read() {
  local -r file=$1
  local line number=0
  [[ -f $file && -r $file ]] || log::die "HOSTFILE=$file: not a readable file; it needs one line per machine"
  hosts=() slots=()
  while IFS= read -r line || [[ -n $line ]]; do
    ((++number))
    line=${line%$'\r'}
    [[ $line =~ ^[[:space:]]*(#|$) ]] && continue
    [[ $line =~ ^[[:space:]]*([^[:space:]-][^[:space:]]*)[[:space:]]+slots=([0-9]+)[[:space:]]*(#.*)?$ ]] ||
      log::die "HOSTFILE=$file, line $number: '$line': expected a machine and its GPUs: node1 slots=8"
    [[ " ${hosts[*]-} " != *" ${BASH_REMATCH[1]} "* ]] ||
      log::die "HOSTFILE=$file, line $number: ${BASH_REMATCH[1]} is listed twice"
    hosts+=("${BASH_REMATCH[1]}")
    slots+=("$((10#${BASH_REMATCH[2]}))")
  done <"$file"
  ((${#hosts[@]})) || log::die "HOSTFILE=$file: no machine in it; expected lines such as node1 slots=8"
}

# Takes the first DGXNNODES machines of a hostfile, each with all its GPUs.
hosts::from_file() {
  local number
  ((${#hosts[@]} >= DGXNNODES)) ||
    log::die "HOSTFILE=$HOSTFILE: ${#hosts[@]} machines and the config wants DGXNNODES=$DGXNNODES: add some, or lower it"
  hosts=("${hosts[@]:0:DGXNNODES}")
  for number in "${!hosts[@]}"; do
    ((slots[number] == DGXNGPU)) ||
      log::die "HOSTFILE=$HOSTFILE: ${hosts[number]} slots=${slots[number]} and DGXNGPU=$DGXNGPU: they must be equal"
  done
}

hosts::check() {
  local host
  for host in "${hosts[@]}"; do # ssh would take it for an option
    [[ $host != -* ]] || log::die "HOSTS=${hosts[*]}: $host is not the name of a machine"
  done
  if ((${#slots[@]})); then hosts::from_file; fi
  ((${#hosts[@]} == DGXNNODES)) ||
    log::die "${#hosts[@]} machines and the config wants DGXNNODES=$DGXNNODES: HOSTS='node1 node2 ...', or HOSTFILE"
  (($(printf '%s\n' "${hosts[@]}" | sort -u | wc -l) == DGXNNODES)) || log::die "HOSTS=${hosts[*]}: a machine is listed twice"
}
