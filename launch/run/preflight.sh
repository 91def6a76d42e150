#!/usr/bin/env bash
# What is looked at once, before the first trial. Sourced by trial.sh.
# shellcheck disable=SC2154 # answers_said and RUN_DIR are of answers.sh and variables.sh

# The trainer's own check, shown as it comes. Where it fails its last complaint is the reason; one that says nothing did not
# run, whatever its exit status.
preflight::check() {
  local reason
  log::info 'checking the configuration'
  if RUN_DIR='' answers::shown runner::python -m "${RANK_MODULE:-bert}" --check && grep -q '^global batch ' <<<"$answers_said"; then return 0; fi
  reason=$(grep 'error: ' <<<"$answers_said" | grep -v '^srun: ' | tail -n 1 | sed 's/.*error: //') || reason=''
  log::die "this configuration cannot run: ${reason:-$(answers::reason "$answers_said")}"
}

# RUN_DIR/topology.txt: what every node is made of, node after node. A record that cannot be made stops nothing.
preflight::record() {
  runner::everywhere "$REPO_DIR/launch/node/record.sh" 2>/dev/null | sort -s -t : -k 1,1 >"$RUN_DIR/topology.txt" ||
    log::warn 'not every node said what it is made of, see topology.txt'
}
