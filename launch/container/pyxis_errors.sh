#!/usr/bin/env bash
# Extracts the reason from failed srun, pyxis and enroot output. Sourced by pyxis.sh and the doctor.

# srun's error about a plugin that it cannot load, in parentheses; empty without one.
pyxis::plugin_error() {
  local -r output=$(grep -iE 'error: .*(plugin|plugstack|spank|dlopen)' <<<"$1" | sed -n '1s/.*error: *//p')
  if [[ $output ]]; then printf ' (%s)' "$output"; fi
}

# The line that best explains why pyxis failed: from a program that enroot runs, else enroot's error, else pyxis', else any
# step's.
pyxis::reason() {
  local -r cause='FATAL ERROR|curl: \([0-9]+\)|No space left on device'
  local reason
  reason=$(
    grep -E -m 1 "$cause" <<<"$1" || grep -m 1 '\[ERROR\]' <<<"$1" ||
      grep 'error: .*pyxis: ' <<<"$1" | grep -m 1 -v 'child [0-9]* failed'
  ) || reason=$(answers::why "$1")
  reason=${reason##*pyxis:}
  answers::with_nodes "$1" "${reason#"${reason%%[![:space:]]*}"}"
}
