#!/usr/bin/env bash
# The page caches, which the rules want dropped before each trial.

caches::everywhere() { answers::everywhere "$REPO_DIR/launch/drop_caches.sh"; }

# True only when they were dropped on every node.
caches::drop() {
  case $CLEAR_CACHES in
    0) return 1 ;;
    require)
      caches::everywhere || log::die "CLEAR_CACHES=require, and the page caches were not dropped:" \
        "allow '$DROPCACHE_CMD' without a password, or set CLEAR_CACHES=1"
      ;;
    1)
      caches::everywhere && return
      log::warn "page caches not dropped ('$DROPCACHE_CMD' is not allowed here): a closed run on GPUs will not start"
      return 1
      ;;
  esac
}
