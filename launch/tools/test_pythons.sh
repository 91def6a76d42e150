#!/usr/bin/env bash
# Runs make test with every supported Python of this machine, each in its own environment, .cache/pythons/VERSION.
# Usage: test_pythons.sh [--list] [INTERPRETER...]; without interpreters: those on PATH, pyenv's, the system's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

candidates() {
  local minor
  for minor in '' .10 .11 .12 .13; do
    command -v "python3$minor" || true
    echo "/usr/bin/python3$minor"
  done
  compgen -G "$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")/versions/*/bin/python" || true
}

# Version and real path of a supported interpreter, through shims, links and environments.
identify() {
  "$1" -c '
import os, platform, sys
if (3, 10) <= sys.version_info[:2] <= (3, 13):
    print(platform.python_version(), os.path.realpath(getattr(sys, "_base_executable", sys.executable)))' 2>/dev/null
}

# Lines "VERSION INTERPRETER", the first found of each version.
find_pythons() {
  local name
  for name in "$@"; do
    identify "$name" || true
  done | sort -s -u -V -k 1,1
}

list=0
[[ ${1:-} == --list ]] && list=1 && shift
if (($#)); then names=("$@"); else mapfile -t names < <(candidates); fi
mapfile -t pythons < <(find_pythons "${names[@]}")
((${#pythons[@]})) || {
  echo "test_pythons: error: no Python 3.10 to 3.13 found; name interpreters: $0 INTERPRETER..." >&2
  exit 2
}
if ((list)); then
  printf '%s\n' "${pythons[@]}"
  exit
fi
results=() failed=0
for line in "${pythons[@]}"; do
  read -r version python <<<"$line"
  echo "test_pythons: Python $version, $python"
  started=$SECONDS result=passed
  folder=.cache/pythons/$version
  # PYTHON is only for creating the environment: the launch scripts under test read it too.
  { PYTHON=$python make "VENV=$folder" "$folder/.dev-ready" && env -u PYTHON make "VENV=$folder" test; } ||
    result=FAILED failed=1
  results+=("$version $result in $((SECONDS - started)) s, $python")
done
printf 'test_pythons: %s\n' "${results[@]}"
exit "$failed"
