#!/usr/bin/env bash
# doctor: does a container of the image run under Slurm, and does the kernel allow it? Sourced by container.sh.
# shellcheck disable=SC2154

# Runs a command in a container of the image, on this node of a job or on any free node.
doctor::pyxis_runs() {
  local -a step=(srun --nodes=1 --ntasks=1)
  local output where='a node of the partition'
  if [[ ${SLURM_JOB_ID:-} ]]; then
    where=${SLURMD_NODENAME:-this job}
    step+=(--overlap ${SLURMD_NODENAME:+"--nodelist=$SLURMD_NODENAME"})
    unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_NNODES SLURM_JOB_NUM_NODES
  else
    step+=(--immediate=60)
  fi
  # shellcheck disable=SC2016 # of the inner shell
  output=$("${step[@]}" --container-image="$(doctor::pyxis_image)" --no-container-mount-home \
    bash -c 'echo "answer ${SLURMD_NODENAME:-node}"' 2>&1 </dev/null)
  if grep -q '^answer ' <<<"$output"; then
    doctor::row pass pyxis "a container of $CONT ran on $(sed -n 's/^answer //p' <<<"$output")"
  elif [[ $output == *'Unable to allocate resources'* || $output == *'Immediate'* ]]; then
    doctor::row skip pyxis "not tried: no node was free within a minute ($(answers::reason "$output"))" 'try again later: launch/doctor.sh container'
  else
    doctor::row fail pyxis "$CONT does not run on $where: $(DGXNNODES=1 pyxis::reason "$output")" \
      'srun launch/doctor.sh container: user namespaces, enroot, its folders'
  fi
}

doctor::pyxis_image() (
  container::load pyxis
  container::check >/dev/null 2>&1
  echo "$CONT"
)

# enroot needs unprivileged user namespaces.
doctor::user_namespaces() {
  local file
  for file in user/max_user_namespaces:0:100000 kernel/unprivileged_userns_clone:0:1 kernel/apparmor_restrict_unprivileged_userns:1:0; do
    IFS=: read -r name bad good <<<"$file"
    if [[ $(cat "$PROC_SYS/$name" 2>/dev/null) == "$bad" ]]; then
      doctor::row fail 'user namespaces' "${name//\//.} is $bad" "sudo sysctl -w ${name//\//.}=$good (and in /etc/sysctl.d)"
      return
    fi
  done
  if unshare --user --map-root-user true 2>/dev/null; then
    doctor::row pass 'user namespaces' 'an unprivileged one could be created'
  else
    doctor::row fail 'user namespaces' 'unshare --user failed' 'sudo sysctl -w user.max_user_namespaces=100000'
  fi
}
