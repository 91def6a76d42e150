#!/usr/bin/env bash
# doctor: what the nodes of a Slurm partition have. Sourced by slurm.sh.
# shellcheck disable=SC2154

# Argument: the gres of a node, such as gpu:h100:8(S:0-1).
doctor::gres() {
  local -r wanted=${GPU_GRES:-gpu}
  local -i count=0
  local gres=$1 part
  while [[ $gres == *'('*')'* ]]; do gres=${gres%%'('*}${gres#*')'}; done
  for part in ${gres//,/ }; do
    if [[ $part == "$wanted:"* || $part == "$wanted" ]]; then count+=$([[ ${part##*:} =~ ^[0-9]+$ ]] && echo "${part##*:}" || echo 1); fi
  done
  if [[ $wanted == none || ${DEVICE:-auto} == cpu ]]; then
    doctor::row pass gres 'steps request no GPUs'
  elif [[ $1 != *gpu* ]]; then
    doctor::row pass gres 'no GPUs among the gres: steps request none, and see all of a node'
  elif ((count == 0)); then
    doctor::row fail gres "the nodes have no $wanted, but $gres" 'in env.sh: export GPU_GRES=none (or gpu:TYPE)'
  elif ((count < ${DGXNGPU:-1})); then
    doctor::row fail gres "a node has $count x $wanted and the config wants DGXNGPU=$DGXNGPU" 'source a config of fewer GPUs'
  else
    doctor::row pass gres "$count x $wanted a node"
  fi
}

# CPUs that Slurm reserves (for WekaIO, say), which the binding leaves out. Argument: the partition.
doctor::reserved_cpus() {
  local node known list count
  node=$(sinfo --noheader --partition="$1" --format=%n | sed -n 1p)
  known=$(scontrol show node "$node" 2>/dev/null | tr -s '[:space:]' '\n')
  list=$(sed -n 's/^CPUSpecList=//p' <<<"$known")
  count=$(sed -n 's/^CoreSpecCount=//p' <<<"$known")
  if [[ $list || ${count:-0} != 0 ]]; then
    doctor::row pass 'reserved CPUs' "${list:-$count cores} of $node: reserved by Slurm"
  elif [[ -n ${RESERVED_CPUS:-} ]]; then
    doctor::row pass 'reserved CPUs' "RESERVED_CPUS=$RESERVED_CPUS: no rank is bound there"
  fi
}
