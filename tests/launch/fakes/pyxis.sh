#!/usr/bin/env bash
# The other half of pyxis.c, as root in the mount namespace of one task. Of the test's folder PYXIS_TEST, the task sees only
# what --container-mounts lists. Containers are folders in PYXIS_TEST/enroot/NODE, shared with the stand-in for enroot.
set -euo pipefail
readonly CONTAINERS=$PYXIS_TEST/enroot/$SLURMD_NODENAME/pyxis_$PYXIS_NAME STAGE=/mnt

fail() {
  echo "pyxis: $*"
  exit 1
}

record() { echo "pyxis $*" >>"$PYXIS_TEST/calls"; }

if [[ ! -d $CONTAINERS ]]; then
  [[ $PYXIS_IMAGE ]] || fail "a container with name \"$PYXIS_NAME\" does not exist, and --container-image is not set"
  if [[ $PYXIS_IMAGE != *'#'* && ! -r $PYXIS_IMAGE ]]; then
    echo 'pyxis: child 17 failed with error code: 1'
    echo 'pyxis: failed to import docker image'
    echo 'pyxis: printing enroot log file:'
    echo 'pyxis:     [INFO] Querying registry for permission grant'
    fail '    [ERROR] URL https://auth.docker.io/token returned error code: 401 Unauthorized'
  fi
  mkdir -p "$CONTAINERS"
  record "create $SLURMD_NODENAME $PYXIS_NAME $PYXIS_IMAGE"
fi
if ((SLURM_PROCID == 0)); then
  record "start image=$PYXIS_IMAGE home=$PYXIS_HOME root=$PYXIS_ROOT writable=$PYXIS_WRITABLE mounts=$PYXIS_MOUNTS"
fi

# What the test itself needs inside counts as part of the image.
mount -t tmpfs none "$STAGE"
mapfile -t mounts < <(tr ',' '\n' <<<"$PYXIS_MOUNTS")
mounts+=("$PYXIS_TEST/bin:$PYXIS_TEST/bin:ro" "$PYXIS_TEST/calls:$PYXIS_TEST/calls:rw")
touch "$PYXIS_TEST/calls"
for i in "${!mounts[@]}"; do
  source=${mounts[i]%%:*}
  [[ -e $source ]] || fail "enroot-mount: failed to mount: $source: No such file or directory"
  if [[ -d $source ]]; then mkdir "$STAGE/$i"; else touch "$STAGE/$i"; fi
  mount --rbind "$source" "$STAGE/$i"
done
mount -t tmpfs none "$PYXIS_TEST"
mount -t tmpfs none /media
for i in "${!mounts[@]}"; do
  IFS=: read -r _ target flags <<<"${mounts[i]}"
  if [[ ! -e $target ]]; then
    if [[ -d $STAGE/$i ]]; then mkdir -p "$target"; else mkdir -p "${target%/*}" && touch "$target"; fi
  fi
  mount --rbind "$STAGE/$i" "$target"
  if [[ $flags == ro ]]; then mount -o remount,bind,ro "$target"; fi
done
umount -R "$STAGE"

# The image's environment, and what enroot's hook for PyTorch adds to it.
echo "PYTORCH_VERSION=2"
echo "MASTER_ADDR=wrong.example"
echo "MASTER_PORT=1"
echo "WORLD_SIZE=$SLURM_NTASKS"
echo "RANK=0"
echo "LOCAL_RANK=0"
echo "OMP_NUM_THREADS=1"
echo "INSIDE=$PYXIS_NAME"
