#!/usr/bin/env bash
# Creates a virtual environment with pinned packages. Usage: setup_venv.sh FOLDER run|dev
# Respects pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) and PYTHON=interpreter.
set -euo pipefail
readonly VENV=${1:?folder} KIND=${2:?run or dev}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "setup: error: $*" >&2 && exit 2; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

find_python() {
  local name
  for name in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.13 python3.14 python3.11 python3.10; do
    if command -v "$name" >/dev/null && supported "$name"; then echo "$name" && return; fi
  done
  fail 'no Python 3.10 to 3.14 found: install one, or set PYTHON=/path/to/python3'
}

if [[ ! -x $VENV/bin/python ]] || ! supported "$VENV/bin/python"; then
  rm -rf "$VENV"
  python=$(find_python)
  echo "setup: virtual environment $VENV with $("$python" --version)"
  "$python" -m venv "$VENV" >/dev/null 2>&1 || {
    rm -rf "$VENV"
    fail "$python cannot make a virtual environment: apt-get install python3-venv, then again"
  }
fi
# A log has no progress bars.
install() { "$VENV/bin/python" -m pip --disable-pip-version-check install --progress-bar "$([[ -t 1 ]] && echo on || echo off)" "$@"; }

# mwparserfromhell of requirements/wiki.txt has no wheel for Python 3.14: without headers to compile it, its slower parser in Python.
headers=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
if [[ ! -e $headers/Python.h ]] || ! command -v cc >/dev/null; then export WITH_EXTENSION=0; fi

# What comes as source alone (seqeval) asks for packages to build it, which the pip of Debian 12 gets without those that they need.
export PIP_USE_PEP517=1

echo 'setup: PyTorch'
install -r requirements/torch.txt
echo "setup: packages of requirements/$KIND.txt"
install -r "requirements/$KIND.txt"
install --no-deps -e .
touch "$VENV/.$KIND-ready"
[[ $KIND == dev ]] && touch "$VENV/.run-ready"
"$VENV/bin/python" -c '
import platform, torch
build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for AMD GPUs" if torch.version.hip else "for CPUs"
print(f"setup: done: Python {platform.python_version()}, PyTorch {torch.__version__}, the build {build}")'
