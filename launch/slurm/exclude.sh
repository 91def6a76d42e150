#!/usr/bin/env bash
# A job of one CPU, which requeue.sh submits: excludes nodes from a job. Slurm allows that only while the job is pending, when nothing of
# it runs any more, so this is tried until then, or until the job runs again or is gone. Usage: exclude.sh JOB RESTARTS NODES NUMBER
set -uo pipefail
readonly JOB=$1 RESTARTS=$2 NODES=$3 NUMBER=$4 # RESTARTS: of the start that is to end; NUMBER: of nodes the job wants
until scontrol update "jobid=$JOB" "ExcNodeList=$NODES" "NumNodes=$NUMBER"; do
  shown=$(scontrol --oneliner show job "$JOB")
  [[ $shown =~ ' JobState='(PENDING|COMPLETING|REQUEUE|SUSPENDED|CONFIGURING) || $shown == *' JobState=RUNNING'*" Restarts=$RESTARTS "* ]] || exit 1
  sleep 2
done
