#!/usr/bin/env bash
# Runs a command on a node and, where it succeeds, says so: what answers.sh counts. Usage: answer.sh COMMAND...
set -uo pipefail
"$@" || exit
echo "answer ${SLURMD_NODENAME:-$(uname -n)}"
