#!/usr/bin/env bash
# One-line messages on stderr. Sourced by the run scripts.

log::info() { printf 'run: %s\n' "$*" >&2; }
log::warn() { printf 'run: warning: %s\n' "$*" >&2; }
log::error() { printf 'run: error: %s\n' "$*" >&2; }

# Bad input: says what, where and what to do, and exits before anything has started.
log::die() {
  log::error "$@"
  exit 2
}
