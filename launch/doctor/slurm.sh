#!/usr/bin/env bash
# doctor: Slurm as run.sub uses it. Sourced by doctor.sh.

doctor::slurm() {
  local output
  if ! command -v sbatch >/dev/null; then
    doctor::row skip slurm 'no sbatch here: run_local.sh, run_with_docker.sh and run_multinode.sh need none'
    return
  fi
  if ! output=$(timeout 20 sinfo --noheader --format='%R|%a|%D|%G' 2>&1); then
    doctor::row fail slurm "sinfo: ${output##*: }" 'SLURM_CONF, or /etc/slurm/slurm.conf: the right cluster? There: systemctl status slurmctld munge'
    return
  fi
  doctor::row pass slurm "$(sinfo --version), $(wc -l <<<"$output") partitions"
  doctor::partition "$output"
  doctor::runtimes
}

# Argument: lines PARTITION|up or down|NODES|GRES.
doctor::partition() {
  local -r name=${SBATCH_PARTITION:-$(sinfo --noheader --format=%P | sed -n 's/[*]$//p' | sed -n 1p)}
  local line up nodes gres problem="$name: no such partition"
  if [[ -z $name ]]; then problem='no default partition, and SBATCH_PARTITION is not set'; fi
  line=$(grep -m 1 "^$name|" <<<"$1") || {
    doctor::row fail partition "$problem" "in env.sh: export SBATCH_PARTITION=$(cut -d'|' -f1 <<<"$1" | sort -u | paste -sd'|')"
    return
  }
  IFS='|' read -r _ up nodes gres <<<"$line"
  if [[ $up != up ]]; then
    doctor::row fail partition "$name is $up" "scontrol update PartitionName=$name State=UP"
  elif ((nodes < DGXNNODES)); then
    doctor::row fail partition "$name has $nodes nodes and the config wants DGXNNODES=$DGXNNODES" 'source a smaller config'
  else
    doctor::row pass partition "$name, $nodes nodes of $gres"
  fi
  doctor::gres "$gres"
}

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

# A row of each container runtime that needs something of Slurm.
doctor::runtimes() {
  local file
  for file in "$REPO_DIR"/launch/container/runtimes/*.sh; do
    if ! container::defines "$file" container::doctor_platform; then continue; fi
    # shellcheck source=/dev/null
    source "$file"
    container::doctor_platform
  done
}
