#!/usr/bin/env bash
# What srun, pyxis and enroot say when they fail, as a reason. Sourced by pyxis.sh and the doctor.

# What srun says of a plugin that it cannot load, in parentheses; nothing where it says nothing.
pyxis::plugin_error() {
  local -r said=$(grep -iE 'error: .*(plugin|plugstack|spank|dlopen)' <<<"$1" | sed -n '1s/.*error: *//p')
  if [[ $said ]]; then printf ' (%s)' "$said"; fi
}

# The line that says most of why pyxis failed: of a program that enroot runs, else enroot's error, else pyxis's own, else
# what any step would say.
pyxis::reason() {
  local -r cause='FATAL ERROR|curl: \([0-9]+\)|No space left on device'
  local reason
  reason=$(
    grep -E -m 1 "$cause" <<<"$1" || grep -m 1 '\[ERROR\]' <<<"$1" ||
      grep 'error: .*pyxis: ' <<<"$1" | grep -m 1 -v 'child [0-9]* failed'
  ) || reason=$(answers::why "$1")
  reason=${reason##*pyxis:}
  echo "${reason#"${reason%%[![:space:]]*}"}"
}
