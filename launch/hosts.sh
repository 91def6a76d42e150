#!/usr/bin/env bash
# The machines of run_multinode.sh, and the names that Samsung's script has for its settings.
# shellcheck disable=SC2154 # hosts is run_multinode.sh's

hosts::load() {
  local -r config=$REPO_DIR/configs/config_${DGXSYSTEM:-}.sh
  if [[ -n ${HOSTS:-} ]]; then read -ra hosts <<<"${HOSTS//,/ }"; fi
  # DGXSYSTEM alone names a config; a config that was sourced has set the batch as well.
  if [[ -n ${DGXSYSTEM:-} && -z ${BATCHSIZE:-} ]]; then
    [[ -f $config ]] || log::die "DGXSYSTEM=$DGXSYSTEM: no such config: $config"
    # shellcheck source=/dev/null
    source "$config"
  fi
  if [[ -n ${INPUT_DIR:-} ]]; then
    if [[ ${PACKED:-0} == 1 ]]; then export DATADIR_PHASE2_PACKED=$INPUT_DIR; else export DATADIR_PHASE2=$INPUT_DIR; fi
  fi
  if [[ -n ${EVAL_DIR:-} ]]; then export EVALDIR=$EVAL_DIR; fi
  if [[ -n ${CHECKPOINTDIR_PHASE1:-} && -z ${INIT_CHECKPOINT+x} ]]; then
    export INIT_CHECKPOINT=$CHECKPOINTDIR_PHASE1/model.ckpt-28252.pt
  fi
}

hosts::check() {
  ((${#hosts[@]} == DGXNNODES)) ||
    log::die "${#hosts[@]} machines and the config wants DGXNNODES=$DGXNNODES: HOSTS='node1 node2 ...'"
  (($(printf '%s\n' "${hosts[@]}" | sort -u | wc -l) == DGXNNODES)) || log::die "HOSTS=${hosts[*]}: a machine stands there twice"
}
