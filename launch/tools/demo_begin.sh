#!/usr/bin/env bash
# Common start of the demos: Python, a check of exported names, ending child processes on a signal. Sourced in the checkout's
# folder.
readonly REPO_DIR=$PWD PYTHON=${PYTHON:-$PWD/.venv/bin/python} CORPUS=${CORPUS:-pydoc}
export PYTHON PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}
# shellcheck source=launch/load.sh
source launch/load.sh run/log run/child run/variables

demo::step() { printf '\n== %s\n' "$*" >&2; }

trap child::end TERM INT HUP QUIT
variables::check_names
