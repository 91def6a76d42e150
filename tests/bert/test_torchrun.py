"""The trainer under a plain torchrun, without the launch scripts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def test_torchrun_alone_trains_to_the_target(prepared, repository, quick_python):
    environment = prepared | {"TARGET_MLM_ACCURACY": "0.001"}
    environment |= {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    environment |= {
        "PYTHONPATH": f"{repository / 'implementations'}:{repository}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torchrun = [quick_python, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--no-python"]
    options = {"capture_output": True, "text": True, "timeout": 900}
    command = [*torchrun, quick_python, "-m", "bert"]
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr
    log = Path(prepared["RUN_DIR"], "result_0.txt").read_text()
    assert log.count('"key": "run_stop"') == 1
    assert '"status": "success"' in log
    # Two ranks of 3 rows that count for 2 sequences.
    assert '"key": "global_batch_size", "value": 12' in log
