#!/usr/bin/env bash
# TCP port for the rendezvous of the ranks.

# Prints MASTER_PORT, or a port free on this node, below the range of outgoing connections. Slurm jobs search from different
# numbers, so that two jobs sharing a node do not take the same port.
port::free() {
  local port i first=$((${SLURM_JOB_ID:-RANDOM} * 16))
  if [[ ${MASTER_PORT:-} ]]; then echo "$MASTER_PORT" && return; fi
  for ((i = 0; i < 50; i++)); do
    port=$((20000 + (first + RANDOM % 16 + i * 16) % 10000))
    (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
  done
  echo "$port"
}
