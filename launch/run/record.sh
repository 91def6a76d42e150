#!/usr/bin/env bash
# Records: how ranks, steps and attempts report. A record is one line of five fields, separated by tabs: kind, rank, node, step,
# reason; "-" where there is none. Sourced.
#   bad_input, not_reached, failed   a rank ended with exit status 2, 3, another
#   hung                             a rank ended because others did not reach a collective (exit status 4)
#   killed                           a rank was killed from outside (SIGKILL)
#   crashed, ended                   by another signal; by one that launchers send when another rank has failed
#   missing                          a rank did not reach a collective, as the others say
#   unfit                            the start test names this node
#   broken                           a step did not run on this node, and did on others
#   lost                             Slurm has lost this node
#   last                             why the attempt ends, for the last line of the run
# The first rank that ends badly leaves RUN_DIR/status, one record; an attempt appends to ATTEMPT_STATUS, which the supervisor reads.

record::line() {
  local -a fields=("${@:1:5}")
  local i
  for i in "${!fields[@]}"; do
    fields[i]=${fields[i]//[$'\t\n']/ }
    fields[i]=${fields[i]:--}
  done
  printf '%s\t%s\t%s\t%s\t%s\n' "${fields[@]}"
}

# Leaves the record of a rank in a folder that nodes share. Whole: written beside, then linked, which fails if there is one. The
# causes replace what other ranks report because of them. Arguments: folder, the five fields.
record::leave() {
  local -r file=$1/status beside=$1/.status_$3
  local kind='' rank node step reason
  record::line "${@:2}" >"$beside" || return
  record::read 2>/dev/null <"$file"
  if [[ $2 == killed || $2 == crashed || ($kind == @(hung|ended) && $2 != @(hung|ended)) ]]; then
    mv -f -- "$beside" "$file"
  else
    ln -- "$beside" "$file" 2>/dev/null
  fi
  rm -f -- "$beside"
}

# The same, with the reason of the rank's trainer if it has left one. The causes replace it: the other ranks report broken connections.
record::explain() {
  local -r error=$1/error_${TRIAL:-0}.txt
  if [[ $2 == killed || $2 == crashed ]]; then rm -f -- "$error"; fi
  (set -o noclobber && echo "$6" >"$error") 2>/dev/null
  record::leave "${@:1:5}" "$(head -n 1 -- "$error")"
}

# Reads one record from stdin into kind, rank, node, step, reason, which the caller declares. A line that is cut off is none.
record::read() {
  local -r tabs=$'[^\t]+\t[^\t]+\t[^\t]+\t[^\t]+\t[^\t]+'
  local line
  while IFS= read -r line; do
    if [[ ! $line =~ ^$tabs$ ]]; then continue; fi
    # shellcheck disable=SC2034 # the caller's
    IFS=$'\t' read -r kind rank node step reason <<<"$line"
    return
  done
  return 1
}

# Reports to the supervisor. Without one (the doctor) nothing is reported.
record::report() {
  if [[ ${ATTEMPT_STATUS:-} ]]; then record::line "$@" >>"$ATTEMPT_STATUS"; fi
}
