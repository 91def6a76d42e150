#!/usr/bin/env bash
# REHEARSAL=1: one trial of the start of a run, then the verdict: go, or the likeliest fault. Sourced by trial.sh.

# A rehearsal is one trial, never part of a submission.
rehearsal::settings() {
  if [[ $REHEARSAL == 0 ]]; then return 0; fi
  export NEXP=1 CHECK_COMPLIANCE=0
}

# After the trial: compares it with published runs. Exits with 0 if the verdict is go.
rehearsal::judge() {
  if [[ $REHEARSAL == 0 || ! -f $RUN_DIR/result_0.txt ]]; then return 0; fi
  if runner::python -m review rehearsal "$RUN_DIR"; then
    log::info "rehearsal: go: $RUN_DIR"
    exit 0
  fi
  failures+=("the rehearsal differs from published runs, see above")
}
