#!/usr/bin/env bash
# The CPUs of this node that ranks may use; binding.py divides them. Sourced.

# Converts a CPU list such as 0-3,8 to one number per line.
topology::expand() {
  local part
  for part in ${1//,/ }; do seq "${part%-*}" "${part#*-}"; done
}

# CPUs this process may use, one per line: without those reserved by Slurm, a container or RESERVED_CPUS (a list).
topology::allowed() {
  local -r file=${PROC_STATUS:-/proc/self/status}
  topology::expand "$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "$file")" |
    grep -vxF -f <(topology::expand "${RESERVED_CPUS:-}" && echo none)
}

# CPU threads for each of the ranks of this node.
binding::threads() {
  local -r count=$(($(topology::allowed | wc -l) / $1))
  echo $((count > 1 ? count : 1))
}
