#!/usr/bin/env bash
# Variables passed to a container or another machine: all exported ones, as with pyxis, except those of this login, this
# machine's programs and its Slurm job, and any that look like secrets. Names and values never appear on a command line that
# others can read.

ENVIRONMENT_LOGIN='_|HOME|HOST|HOSTNAME|LOGNAME|USER|MAIL|SHELL|SHLVL|TERM.*|COLORTERM|PWD|OLDPWD|LANG|LC_.*|TZ|EDITOR|PAGER|DISPLAY'
ENVIRONMENT_SESSION='SUDO_.*|SSH_.*|XDG_.*|DBUS_.*|GPG_.*|TMUX.*|STY|LS_COLORS|SLURM.*|SBATCH_.*|DOCKER_.*|PBS_.*'
ENVIRONMENT_PROGRAMS='PATH|MANPATH|INFOPATH|TMPDIR|TMP|TEMP|LD_.*|LIBRARY_PATH|CPATH|PYTHONHOME|PYTHONPATH|VIRTUAL_ENV.*'
ENVIRONMENT_PROGRAMS+='|CONDA_.*|PYENV.*|PIP_.*|MODULE.*|BASH_.*|.*CA_BUNDLE|SSL_CERT_.*'
ENVIRONMENT_SECRET='.*(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_KEY|ACCESS_KEY).*'

# Prints the names, one per line.
environment::names() {
  compgen -e | grep -vxE "$ENVIRONMENT_LOGIN|$ENVIRONMENT_SESSION|$ENVIRONMENT_PROGRAMS|$ENVIRONMENT_SECRET"
}

# Prints NUL-terminated NAME=VALUE entries, and an empty one at the end.
environment::print() {
  local name
  for name in $(environment::names); do printf '%s=%s\0' "$name" "${!name}"; done
  printf '\0'
}

# Exports the output of environment::print, from stdin.
environment::read() {
  local entry
  while IFS= read -r -d '' entry && [[ $entry ]]; do export "${entry?}"; done
}
