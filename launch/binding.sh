#!/usr/bin/env bash
# Which CPUs a rank runs on: those near its GPU, as far as this process may use them. Never fatal.
#   BINDING=numa       all allowed CPUs of the GPU's NUMA node, shared by its ranks
#   BINDING=exclusive  whole cores of them for each rank alone
#   BINDING=none       as the launcher left it
# shellcheck source=launch/topology.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/topology.sh"

# CPU threads for each of the ranks of this node.
binding::threads() {
  local -r count=$(($(topology::allowed | wc -l) / $1))
  echo $((count > 1 ? count : 1))
}

# CPU list of local rank $1 of $2 for BINDING $3; empty where nothing can be said.
binding::cpus() {
  local -r rank=$1 ranks=$2 mode=$3
  local -a cpus=() share=()
  local i near other index=0 peers=0
  near=$(topology::near "$rank" "$ranks" "$(topology::gpu "$rank")")
  mapfile -t cpus < <(topology::expand "$near" | grep -xF -f <(topology::allowed))
  if [[ $mode == exclusive ]]; then
    for ((i = 0; i < ranks; i++)); do
      other=$(topology::near "$i" "$ranks" "$(topology::gpu "$i")")
      if [[ $other == "$near" ]]; then
        if ((i < rank)); then index=$((index + 1)); fi
        peers=$((peers + 1))
      fi
    done
    mapfile -t share < <(binding::share "$index" "$peers" "${cpus[@]}")
    if ((${#share[@]})); then cpus=("${share[@]}"); fi # fewer cores than ranks: they share
  fi
  if ((${#cpus[@]})); then printf '%s\n' "${cpus[@]}" | topology::compress; fi
}

# The whole cores of share $1 of $2 of the CPUs that follow, one CPU a line; nothing when the cores are too few.
binding::share() {
  local -r index=$1 peers=$2
  shift 2
  topology::cores | sort -n | awk -v share="$index" -v peers="$peers" -v wanted=" $* " '
    index(wanted, " " $2 " ") { if (!count || $1 != core) cores++; core = $1; of[++count] = cores - 1; cpu[count] = $2 }
    END { for (i = 1; i <= count; i++) if (cores >= peers && int(of[i] * peers / cores) == share) print cpu[i] }'
}

# Binds this process, which becomes the rank. What cannot be bound runs unbound, and says so.
binding::apply() {
  local -r rank=$1 ranks=$2 mode=${BINDING:-numa}
  local cpus
  if [[ $mode == none ]]; then return 0; fi
  topology::read_gpus
  cpus=$(binding::cpus "$rank" "$ranks" "$mode") || cpus=''
  if [[ -z $cpus ]]; then
    echo "run: warning: local rank $rank is not bound: no CPU near its GPU is allowed here" >&2
  elif ! taskset -pc "$cpus" $$ >/dev/null 2>&1; then
    echo "run: warning: local rank $rank is not bound: taskset does not take the CPUs $cpus" >&2
  fi
}

# With NIC_BINDING=nearest, NCCL's traffic of a rank takes the cards nearest to its GPU. A NCCL_IB_HCA of the user stands.
binding::nics() {
  local gpu nics
  if [[ ${NIC_BINDING:-none} == none || -n ${NCCL_IB_HCA:-} ]]; then return 0; fi
  gpu=$(topology::gpu "$1")
  nics=$(topology::nics "${gpu:-none}")
  if [[ $gpu && $nics != - ]]; then
    export NCCL_IB_HCA="=$nics" # the sign makes it a list of whole names: mlx5_1 is not mlx5_10
  else
    echo "run: warning: NIC_BINDING=nearest: local rank $1 has no GPU or no active card that sysfs knows: NCCL chooses" >&2
  fi
}

# What apply does on this node, for the log.
binding::table() {
  local -r ranks=$1 mode=${BINDING:-numa}
  local rank gpu cpus
  topology::read_gpus
  printf 'run: binding %s on %s\n' "$mode" "${SLURMD_NODENAME:-$(uname -n)}"
  printf 'run: %4s  %-12s  %4s  %-10s  %s\n' rank GPU NUMA NIC CPUs
  for ((rank = 0; rank < ranks; rank++)); do
    gpu=$(topology::gpu "$rank")
    if [[ $mode != none ]]; then cpus=$(binding::cpus "$rank" "$ranks" "$mode"); else cpus=''; fi
    printf 'run: %4d  %-12s  %4s  %-10s  %s\n' "$rank" "${gpu:--}" "$(topology::numa_node "${gpu:-none}")" \
      "$(topology::nics "${gpu:-none}")" "${cpus:-as given}"
  done
}
