#!/usr/bin/env bash
# KERNEL_CACHE: where compilers keep their output between trials and jobs. No home folder outlives a container: without the
# cache each trial in docker would compile every kernel. A compiler's own variable, if exported by the user, wins.

# In a rank: sets the compilers' variables. An unwritable folder costs time but does not stop the run.
kernel_cache::export() {
  if [[ ! ${KERNEL_CACHE:-} ]]; then return; fi
  if ! mkdir -p -- "$KERNEL_CACHE" 2>/dev/null || [[ ! -w $KERNEL_CACHE ]]; then
    if ((${LOCAL_RANK:-0} == 0)); then
      echo "run: warning: KERNEL_CACHE=$KERNEL_CACHE cannot be written: kernels are compiled in each trial" >&2
    fi
    return
  fi
  export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$KERNEL_CACHE/triton}
  export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$KERNEL_CACHE/inductor}
  export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$KERNEL_CACHE/cuda} # the driver's cache of code compiled for GPUs that a library lacks
  export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$KERNEL_CACHE/numba}
}
