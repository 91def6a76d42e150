"""The trainer under a plain torchrun, without the launch scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_torchrun_alone_trains_to_the_target(prepared, repository):
    environment = prepared | {"TARGET_MLM_ACCURACY": "0.001", "PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    environment |= {"PYTHONPATH": str(repository / "implementations"), "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bert"]
    done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    log = Path(prepared["RUN_DIR"], "result_0.txt").read_text()
    assert log.count('"key": "run_stop"') == 1
    assert '"status": "success"' in log
    assert '"key": "global_batch_size", "value": 12' in log, "two ranks of 3 rows that count for 2 sequences"
