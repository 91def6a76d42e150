"""certify.sh on this machine: every rank's times and weights are recorded, and judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bert.certify import checksum

MODEL = {"vocab_size": 211, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
MODEL |= {"intermediate_size": 40, "max_position_embeddings": 48}
SETTINGS = {"MAX_SEQ_LENGTH": "48", "BATCHSIZE": "2", "CERTIFY_SECONDS": "0.1", "DEVICE": "cpu", "OMP_NUM_THREADS": "1"}


def run(repository: Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "model.json").write_text(json.dumps(MODEL))
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environ = kept | SETTINGS | {"LOGDIR": str(folder / "results"), "BERT_CONFIG": str(folder / "model.json")}
    environ |= {"PYTHON": sys.executable, "RUN_NAME": "test", "BINDING": "none"} | env
    return subprocess.run(
        [repository / "certify.sh"], env=environ, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_machine_whose_ranks_compute_the_same_passes(repository, tmp_path):
    done = run(repository, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "pass"
    assert "too few ranks to tell" in done.stdout
    records = [json.loads((tmp_path / f"results/test/certify_rank{rank}.json").read_text()) for rank in (0, 1)]
    assert len({record["weights_crc32"] for record in records}) == 1
    assert len({len(times) for record in records for times in record["seconds"].values()}) == 1, "the same work for all"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"CERTIFY_SECONDS": "soon"}, "CERTIFY_SECONDS='soon': expected a number above 0"),
        ({"BATCHSIZE": "many"}, "the load did not run: BATCHSIZE='many': expected an integer"),
    ],
)
def test_bad_settings_are_one_line(repository, tmp_path, how, reason):
    done = run(repository, tmp_path, **how)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"run: error: {reason}")


def test_one_flipped_bit_changes_the_checksum():
    weights = torch.randn(101, generator=torch.Generator().manual_seed(0))
    other = weights.clone()
    other.view(torch.int32)[17] ^= 1
    assert checksum([weights, weights]) == checksum([weights.clone(), weights])
    assert checksum([weights, other]) != checksum([weights, weights])
    assert checksum([weights.bfloat16()]) == checksum([weights.bfloat16()])
