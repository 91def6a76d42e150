#!/usr/bin/env bash
# How steps and attempts report, by records (records.py). Sourced.

# Prints one. Arguments: kind, rank, node, step, reason; - where there is none.
record::line() { printf '%s\t%s\t%s\t%s\t%s\n' "${@:1:4}" "${5//[$'\t\n']/ }"; }

# Reports to the supervisor.
record::report() { record::line "$@" >>"$ATTEMPT_STATUS"; }
