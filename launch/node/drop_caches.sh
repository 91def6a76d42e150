#!/usr/bin/env bash
# Drops the page caches of this node: as root, or by DROPCACHE_CMD. Exit status 0 only if that succeeded.
set -uo pipefail
sync
{ echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null && exit
read -ra command <<<"${DROPCACHE_CMD:-false}"
"${command[@]}" >/dev/null 2>&1 </dev/null
