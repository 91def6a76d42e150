#!/usr/bin/env bash
# A TCP port for the rendezvous of the ranks.

# Prints MASTER_PORT, or a port on which nothing listens on this node. They lie below the range of outgoing connections.
port::free() {
  local port i
  if [[ -n ${MASTER_PORT:-} ]]; then
    echo "$MASTER_PORT"
    return
  fi
  for ((i = 0; i < 50; i++)); do
    port=$((20000 + RANDOM % 10000))
    (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
  done
  echo "$port"
}
