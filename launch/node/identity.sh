#!/usr/bin/env bash
# Prints a word that no two machines share, and that all names of one machine have in common. Containers that share a kernel have
# names of their own.
set -euo pipefail
printf '%s_%s\n' "$(</proc/sys/kernel/random/boot_id)" "$(uname -n)"
