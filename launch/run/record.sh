#!/usr/bin/env bash
# How steps and attempts report, by records (records.py). Sourced.

# Prints one. Arguments: kind, rank, node, step, reason; - where there is none.
record::line() {
  local -a fields=("${@:1:5}")
  local i
  for i in "${!fields[@]}"; do
    fields[i]=${fields[i]//[$'\t\n']/ }
    fields[i]=${fields[i]:--}
  done
  printf '%s\t%s\t%s\t%s\t%s\n' "${fields[@]}"
}

# Reports to the supervisor. Without one (the doctor) nothing is reported.
record::report() {
  if [[ ${ATTEMPT_STATUS:-} ]]; then record::line "$@" >>"$ATTEMPT_STATUS"; fi
}
