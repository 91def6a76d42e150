#!/usr/bin/env bash
# Sources parts of the launcher, by their paths in launch/ without .sh. Usage: source launch/load.sh run/log run/child ...
# A part may load others by the same loop: the arguments of `source` are the positional parameters within that call alone.
if ! declare -F state::declare >/dev/null; then # the first time
  REPO_DIR=$(cd -- "${BASH_SOURCE[0]%/*}/.." && pwd -P)
  # shellcheck source=launch/state.sh
  source "$REPO_DIR/launch/state.sh"
fi
for part; do
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/$part.sh"
done
