#!/usr/bin/env bash
# Drops the page caches of this node: as root, or as sudo allows. Exit status 0 only if that succeeded.
set -uo pipefail
sync
{ echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null && exit
sudo -n /sbin/sysctl -q vm.drop_caches=3 >/dev/null 2>&1 </dev/null
