#!/usr/bin/env bash
# The reason in the output of srun, pyxis and enroot when they fail. Sourced by pyxis.sh and the doctor.

# srun's complaint about a plugin that it cannot load, in parentheses; nothing without one.
pyxis::plugin_error() {
  local -r said=$(grep -iE 'error: .*(plugin|plugstack|spank|dlopen)' <<<"$1" | sed -n '1s/.*error: *//p')
  if [[ $said ]]; then printf ' (%s)' "$said"; fi
}

# The line that best explains why pyxis failed: of a program that enroot runs, else enroot's error, else pyxis's own, else
# that of any step.
pyxis::reason() {
  local -r cause='FATAL ERROR|curl: \([0-9]+\)|No space left on device'
  local reason
  reason=$(
    grep -E -m 1 "$cause" <<<"$1" || grep -m 1 '\[ERROR\]' <<<"$1" ||
      grep 'error: .*pyxis: ' <<<"$1" | grep -m 1 -v 'child [0-9]* failed'
  ) || reason=$(answers::why "$1")
  reason=${reason##*pyxis:}
  answers::named "$1" "${reason#"${reason%%[![:space:]]*}"}"
}
