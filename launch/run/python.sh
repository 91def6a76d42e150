#!/usr/bin/env bash
# Which Python runs, for every script that starts one: PYTHON; else `python` of the active environment, if it has PyTorch; else .venv
# (make setup); else python, or python3. In containers it is the image's. Sourced.

python::has_torch() { "$1" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null; }

# Sets and exports PYTHON.
python::choose() {
  local -r own=$REPO_DIR/.venv/bin/python
  if [[ ! ${PYTHON:-} ]]; then
    PYTHON=python
    if [[ ${CONT:-} && ${CONTAINER_RUNTIME:-} != none ]]; then
      :
    elif [[ -x $own ]] && ! python::has_torch python; then
      PYTHON=$own
    elif ! command -v python >/dev/null && command -v python3 >/dev/null; then
      PYTHON=python3
    fi
  fi
  export PYTHON
}

# Runs a program of the launcher: by the machine's own interpreter, since it decides for machines too that have no PyTorch.
python::host() { env -u PYTHONHOME PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR" python3 -B -s -S "$@"; }

# Stops with one line if it cannot.
python::require_host() {
  python::host -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null ||
    log::die "$(uname -n) has no python3 of 3.6 or newer, with which the launcher decides: install one (the ranks' own is PYTHON)"
}
