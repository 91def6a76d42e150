#!/usr/bin/env bash
# Prints the hardware of this node: GPUs and their topology, network cards, CPUs, limits. Each line begins with the node's
# name, since many nodes print at once. Missing tools are skipped. Usage: record.sh
set -uo pipefail
NODE=${SLURMD_NODENAME:-$(uname -n)}
readonly NODE

# Runs a command if it is installed, for at most 30 s: tools may hang with a broken driver.
show() {
  command -v "$1" >/dev/null || return 0
  echo "== $*"
  timeout 30 "$@" 2>&1 </dev/null || echo "exit status $?"
}

{
  show nvidia-smi --query-gpu=index,name,uuid,pci.bus_id,vbios_version,driver_version,power.limit,clocks.max.sm --format=csv
  show nvidia-smi topo -m
  show ibv_devinfo
  show numactl --hardware
  show lscpu
  show uname -a
  echo '== open files, locked memory (KB)'
  echo "$(ulimit -Hn) $(ulimit -Hl)"
} | sed -u "s/^/$NODE: /"
