#!/usr/bin/env bash
# CPU threads for each of the ranks of this node ($1), of the CPUs that this process may use: without those reserved by Slurm, a container or
# RESERVED_CPUS (a list such as 0-3,8); binding.py divides them. Sourced.
binding::threads() {
  local -r listed=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "${PROC_STATUS:-/proc/self/status}")
  local -r count=$(($(comm -23 <(binding::expand "$listed") <(binding::expand "${RESERVED_CPUS:-}") | wc -l) / $1))
  echo $((count > 1 ? count : 1))
}

# One number per line, sorted as text.
binding::expand() { for part in ${1//,/ }; do seq "${part%-*}" "${part#*-}"; done | sort; }
