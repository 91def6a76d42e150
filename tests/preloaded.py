"""What the commands of tests are forked from (forked.py): a process that has imported all of this."""

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys

from bert.data import hdf5

from . import forked

PR_SET_PDEATHSIG = 1


def _fork_readers() -> None:
    """Has the helpers that read HDF5 for these commands forked too, from a process without PyTorch: the import of
    NumPy and h5py is nearly all that one costs."""
    address = f"\0hdf5-readers-of-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            forked.serve(listener)
    hdf5.PYTHON = [sys.executable, "-IS", "-c", forked.client_of(address)]


_fork_readers()
gc.disable()  # each pass over the million objects of these imports takes 0.3 s
for name in (
    "pytest", "mlperf_logging.mllog", "bert.data.compiled", "bert.pretraining.train", "finetune.train", "certify.burn_in",
    # What a first step, --check and torch.testing.assert_close import, SymPy among it: two seconds of a core.
    "torch._dynamo", "torch.distributed.tensor", "torch.distributed.run",
):  # fmt: skip
    importlib.import_module(name)
gc.freeze()
gc.set_threshold(50_000, 20)
gc.enable()
