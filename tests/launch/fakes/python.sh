#!/bin/sh
# Stand-in for the interpreter: torchrun is one too (conftest.py fills in its path), everything else runs without site packages.
# The trainers and the review, stand-ins too, are started as files, which takes a third less than by -m.
set -u
case ${1:-} in
  */torchrun.py) exec "${REAL_PYTHON:?}" -IS "TORCHRUN" "$@" ;;
  -u) shift ;;
esac
if [ "${1:-}" = -m ]; then
  for folder in "${PYTHONPATH%%:*}" "${PYTHONPATH#*:}"; do
    if [ -f "$folder/$2/__main__.py" ]; then
      file=$folder/$2/__main__.py
      shift 2
      exec "${REAL_PYTHON:?}" -S "$file" "$@"
    fi
  done
fi
exec "${REAL_PYTHON:?}" -S "$@"
