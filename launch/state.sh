#!/usr/bin/env bash
# What the parts of the launcher share, and who sets it: declared here, so that a part that reads it says where it is from. Sourced by
# the parts; it changes nothing that is set.
#   nodes             of the attempt, rank 0's first: the platform's supervisor.sh, attempt.sh
#   hosts             the machines of run_multinode.sh: ssh/hosts.sh
#   container mounts  prefix of a command in the container, and what is mounted there: container/container.sh
#   variables_outputs names of folders that ranks write to: run/variables.sh
#   runtime_platforms where a container runtime runs: its file
#   srun step ssh     the start of a command on nodes: slurm/runner.sh, slurm/job.sh, ssh/ssh.sh
#   answers_output    of the last command on all nodes: run/answers.sh
#   step_problem      why no step starts: slurm/job.sh
#   restart_suffix    of folders after a restart: run/trial.sh
#   lock_file         descriptor of the run folder's lock: run/variables.sh
#   deadline          when the ranks' time to end is over: run/ending.sh
#   attempts          started so far: supervisor.sh
#   shutdown_seconds  that ranks get to end: run/ending.sh, slurm/job.sh
state::declare() {
  # shellcheck disable=SC2034 # for the parts
  declare -g -a nodes hosts container mounts variables_outputs runtime_platforms srun step ssh
  # shellcheck disable=SC2034 # for the parts
  declare -g answers_output step_problem restart_suffix lock_file deadline attempts shutdown_seconds
}

state::declare
