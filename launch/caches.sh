#!/usr/bin/env bash
# The page caches, which the rules want dropped before each trial.

# True only when they were dropped on every node.
caches::drop() {
  case $CLEAR_CACHES in
    0) return 1 ;;
    require)
      runner::drop_caches || log::die "CLEAR_CACHES=require, and the page caches were not dropped:" \
        "allow '$DROPCACHE_CMD' without a password, or set CLEAR_CACHES=1"
      ;;
    1)
      runner::drop_caches && return
      log::warn "page caches not dropped ('$DROPCACHE_CMD' is not allowed here): a closed run on GPUs will not start"
      return 1
      ;;
  esac
}
