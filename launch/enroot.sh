#!/usr/bin/env bash
# The containers of this user on this node, where pyxis keeps them. Sourced by undo.sh and leftovers.sh.

# pyxis hands enroot none of these, so that a user's ENROOT_DATA_PATH names another folder than the one of the containers.
unset ENROOT_LIBRARY_PATH ENROOT_SYSCONF_PATH ENROOT_RUNTIME_PATH ENROOT_CACHE_PATH ENROOT_DATA_PATH ENROOT_TEMP_PATH

enroot::list() { if command -v enroot >/dev/null; then enroot list 2>/dev/null; fi; }

# Removes the containers named on stdin, one a line.
enroot::remove() {
  local name
  while IFS= read -r name; do enroot remove --force -- "$name" </dev/null >/dev/null; done
}
