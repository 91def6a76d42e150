#!/usr/bin/env bash
# Runs a command on a node and reports its success, for answers.sh to count. Usage: answer.sh COMMAND...
set -uo pipefail
"$@" || exit
echo "answer ${SLURMD_NODENAME:-$(uname -n)}"
