#!/usr/bin/env bash
# Common start of the demos: Python, a check of exported names, ending child processes on a signal. Sourced in the checkout's
# folder.
readonly PYTHON=${PYTHON:-$PWD/.venv/bin/python} CORPUS=${CORPUS:-pydoc}
export PYTHON PYTHONPATH=$PWD/implementations:$PWD${PYTHONPATH:+:$PYTHONPATH}
# shellcheck source=launch/load.sh
source launch/load.sh run/log run/child run/variables

# The last lines: commands to try.
demo::next() { printf '\nWhat to do next:\n  source .venv/bin/activate\n' >&2 && printf '  %s\n' "$@" >&2; }
demo::step() { printf '\n== %s\n' "$*" >&2; }

trap child::end TERM INT HUP QUIT
variables::check_names
