#!/usr/bin/env bash
# Which CPUs a rank runs on: those near its GPU, as far as this process may use them. Never fatal.

# A CPU list such as 0-3,8 as one number a line.
binding::expand() {
  local part
  for part in ${1//,/ }; do seq "${part%-*}" "${part#*-}"; done
}

# CPUs this process may use, one a line: without those reserved by the cluster (WekaIO, system cores).
binding::allowed() { binding::expand "$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "${PROC_STATUS:-/proc/self/status}")"; }

# CPU threads for each of the ranks of this node.
binding::threads() {
  local -r count=$(($(binding::allowed | wc -l) / $1))
  echo $((count > 1 ? count : 1))
}
