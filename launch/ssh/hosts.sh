#!/usr/bin/env bash
# The machines of run_multinode.sh, and its settings under the names of Samsung's script.

hosts::load() {
  local -r config=$REPO_DIR/configs/config_${DGXSYSTEM:-}.sh
  if [[ -n ${HOSTS:-} ]]; then
    read -ra hosts <<<"${HOSTS//,/ }"
  elif [[ -n ${HOSTFILE:-} ]]; then
    hosts::read
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

# Takes the machines of a hostfile. Arguments: how many, and the GPUs that each must have (any).
hosts::read() {
  local output
  output=$(python::host "$REPO_DIR/launch/ssh/hosts.py" "$HOSTFILE" "$@" 2>&1) || log::die "HOSTFILE=$HOSTFILE$output"
  mapfile -t hosts <<<"$output"
}

hosts::check() {
  local host
  for host in "${hosts[@]}"; do # ssh would take it for an option
    [[ $host != -* ]] || log::die "HOSTS=${hosts[*]}: $host is not the name of a machine"
  done
  if [[ ! ${HOSTS:-} && ${HOSTFILE:-} ]]; then hosts::read "$DGXNNODES" "$DGXNGPU"; fi
  ((${#hosts[@]} == DGXNNODES)) ||
    log::die "${#hosts[@]} machines and the config wants DGXNNODES=$DGXNNODES: HOSTS='node1 node2 ...', or HOSTFILE"
  (($(printf '%s\n' "${hosts[@]}" | sort -u | wc -l) == DGXNNODES)) || log::die "HOSTS=${hosts[*]}: a machine is listed twice"
}
