#!/usr/bin/env bash
# Binds a rank to allowed CPUs near its GPU. Never fatal.
#   BINDING=numa       all allowed CPUs of the GPU's NUMA node, shared by its ranks
#   BINDING=exclusive  separate whole cores of these for each rank
#   BINDING=none       as set by the launcher
# Distances come from sysfs. SYSFS and PROC_STATUS name other trees, for tests.

# Converts a CPU list such as 0-3,8 to one number per line, and back.
topology::expand() {
  local part
  for part in ${1//,/ }; do seq "${part%-*}" "${part#*-}"; done
}

topology::compress() {
  sort -n | awk 'NR == 1 { first = last = $1; next } $1 == last + 1 { last = $1; next }
    { printf "%s%s,", first, (last > first ? "-" last : ""); first = last = $1 }
    END { if (NR) printf "%s%s\n", first, (last > first ? "-" last : "") }'
}

# CPUs this process may use, one per line: without those reserved by Slurm, a container or RESERVED_CPUS (a list).
topology::allowed() {
  local -r file=${PROC_STATUS:-/proc/self/status}
  topology::expand "$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "$file")" |
    grep -vxF -f <(topology::expand "${RESERVED_CPUS:-}" && echo none)
}

# Queries the driver once for the GPUs: lines of index, UUID and PCI address.
topology::read_gpus() {
  TOPOLOGY_GPUS=${TOPOLOGY_GPUS-$(nvidia-smi --query-gpu=index,uuid,pci.bus_id --format=csv,noheader 2>/dev/null || true)}
}

# PCI address (as in sysfs) of the GPU of local rank $1, in the order of CUDA_VISIBLE_DEVICES; empty if there is none.
topology::gpu() {
  local -a visible=()
  local address
  IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-}"
  local -r device=${visible[$1]:-$1}
  topology::read_gpus
  address=$(awk -F ', ' -v device="$device" '$1 == device || $2 == device { print tolower($3) }' <<<"$TOPOLOGY_GPUS")
  if [[ $address ]]; then
    echo "${address: -12}" # the driver's PCI domain has 8 digits, that of sysfs 4
  elif [[ $device =~ ^[0-9]+$ ]]; then
    topology::gpus_of_sysfs | sed -n "$((device + 1))p"
  fi
}

# All NVIDIA GPUs, without the driver's help.
topology::gpus_of_sysfs() {
  local device
  for device in "${SYSFS:-/sys}"/bus/pci/devices/*; do
    [[ -r $device/class && $(<"$device/vendor") == 0x10de && $(<"$device/class") == 0x03* ]] || continue
    basename -- "$device"
  done
}

# List of CPUs near local rank $1 of $2: those of its GPU ($3), or without one those of its share of the NUMA nodes.
topology::near() {
  local -r file=${SYSFS:-/sys}/bus/pci/devices/$3/local_cpulist
  local node list
  local -a lists=()
  if [[ -n $3 && -s $file ]]; then
    cat -- "$file"
    return
  fi
  for node in $(printf '%s\n' "${SYSFS:-/sys}"/devices/system/node/node[0-9]* | sort -V); do
    list=$(cat -- "$node/cpulist" 2>/dev/null) || list=''
    if [[ -n $list ]]; then lists+=("$list"); fi # some nodes are memory only
  done
  if ((${#lists[@]})); then echo "${lists[$1 * ${#lists[@]} / $2]}"; fi
}

# Lines CORE CPU of all CPUs, a core named by its first hardware thread.
topology::cores() {
  (cd -- "${SYSFS:-/sys}/devices/system/cpu" && grep -s '' cpu[0-9]*/topology/thread_siblings_list) 2>/dev/null |
    sed 's,^cpu\([0-9]*\)/[^:]*:\([0-9]*\).*,\2 \1,'
}

topology::numa_node() { cat -- "${SYSFS:-/sys}/bus/pci/devices/$1/numa_node" 2>/dev/null || true; }

# Names of the active InfiniBand or RoCE cards that share the longest PCI path with the device at PCI address $1, joined by
# commas; ties go to those of its NUMA node. - for none.
topology::nics() {
  local card path best=- common most=0
  local -r mine=$(realpath -- "${SYSFS:-/sys}/bus/pci/devices/$1" 2>/dev/null)
  for card in $(printf '%s\n' "${SYSFS:-/sys}"/class/infiniband/* | sort -V); do
    grep -qs ACTIVE "$card"/ports/*/state || continue
    path=$(realpath -- "$card/device")
    common=$(printf '%s\n%s\n' "$mine" "$path" | awk -F / 'NR == 1 { split($0, a); next }
      { for (n = 0; n < NF && $(n + 1) == a[n + 1]; n++); print n }')
    common=$((2 * common))
    if [[ $(cat -- "$path/numa_node" 2>/dev/null) == "$(topology::numa_node "$1")" ]]; then common=$((common + 1)); fi
    if ((common > most)); then
      most=$common best=${card##*/}
    elif ((common == most)); then
      best+=,${card##*/}
    fi
  done
  echo "$best"
}

# CPU threads for each of the ranks of this node.
binding::threads() {
  local -r count=$(($(topology::allowed | wc -l) / $1))
  echo $((count > 1 ? count : 1))
}

# CPU list of local rank $1 of $2 for BINDING $3; empty if unknown.
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

# Whole cores of share $1 of $2 of the CPUs that follow, one CPU per line; empty if there are too few cores.
binding::share() {
  local -r index=$1 peers=$2
  shift 2
  topology::cores | sort -n | awk -v share="$index" -v peers="$peers" -v wanted=" $* " '
    index(wanted, " " $2 " ") { if (!count || $1 != core) cores++; core = $1; of[++count] = cores - 1; cpu[count] = $2 }
    END { for (i = 1; i <= count; i++) if (cores >= peers && int(of[i] * peers / cores) == share) print cpu[i] }'
}

# Binds this process, which becomes the rank. If that fails, warns and runs unbound.
binding::apply() {
  local -r rank=$1 ranks=$2 mode=${BINDING:-numa}
  local cpus
  if [[ $mode == none ]]; then return 0; fi
  topology::read_gpus
  cpus=$(binding::cpus "$rank" "$ranks" "$mode") || cpus=''
  if [[ -z $cpus ]]; then
    echo "run: warning: local rank $rank is not bound: no CPU near its GPU is allowed here" >&2
  elif ! taskset -pc "$cpus" $$ >/dev/null 2>&1; then
    echo "run: warning: local rank $rank is not bound: taskset rejects the CPUs $cpus" >&2
  fi
}

# NIC_BINDING=nearest: a rank's NCCL traffic uses the cards nearest to its GPU. The user's NCCL_IB_HCA wins.
binding::nics() {
  local gpu nics
  if [[ ${NIC_BINDING:-none} == none || -n ${NCCL_IB_HCA:-} ]]; then return 0; fi
  gpu=$(topology::gpu "$1")
  nics=$(topology::nics "${gpu:-none}")
  if [[ $gpu && $nics != - ]]; then
    export NCCL_IB_HCA="=$nics" # "=" matches exact names: mlx5_1 is not mlx5_10
  else
    echo "run: warning: NIC_BINDING=nearest: local rank $1 has no GPU or no active card in sysfs: NCCL chooses" >&2
  fi
}

# The binding of all ranks of this node, for the log.
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
