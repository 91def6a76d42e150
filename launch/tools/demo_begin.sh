#!/usr/bin/env bash
# What every demo begins with: its Python, a check of the names that are exported, the end of what it has started. Sourced
# in the checkout's folder.
# shellcheck disable=SC2034 # REPO_DIR is for the files sourced here, CORPUS for the demos
readonly REPO_DIR=$PWD PYTHON=${PYTHON:-$PWD/.venv/bin/python} CORPUS=${CORPUS:-pydoc}
export PYTHON PYTHONPATH=implementations${PYTHONPATH:+:$PYTHONPATH}
for part in run/log run/child run/variables; do
  # shellcheck source=/dev/null
  source "launch/$part.sh"
done

demo::step() { printf '\n== %s\n' "$*" >&2; }

trap child::end TERM INT HUP QUIT
variables::check_names
