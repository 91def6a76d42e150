#!/usr/bin/env bash
# Writes docs/variables.md: every variable, its default and its meaning, grouped. Usage: variables_page.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
readonly PAGE=docs/variables.md
python=${PYTHON:-python3}
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi
PYTHONPATH=implementations "$python" -m bert --variables markdown >"$PAGE.new"
mv -- "$PAGE.new" "$PAGE"
