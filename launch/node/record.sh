#!/usr/bin/env bash
# Hardware of this node, for the record of a run: GPUs and their topology, network cards, CPUs, limits. Each line
# begins with the node's name, since many nodes say it at once. What is not installed is left out. Usage: record.sh
set -uo pipefail
NODE=${SLURMD_NODENAME:-$(uname -n)}
readonly NODE

# Runs a command where it is installed, at most 30 s: tools of a broken driver may hang.
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
