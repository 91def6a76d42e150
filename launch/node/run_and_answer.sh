#!/usr/bin/env bash
# On a node: runs a command and, if it succeeds, prints "answer NODE", which run/answers.sh counts. Usage: run_and_answer.sh COMMAND...
set -uo pipefail
"$@" || exit
echo "answer ${SLURMD_NODENAME:-$(uname -n)}"
