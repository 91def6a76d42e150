"""Records, a model and settings of a run that reaches its target within seconds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from bert.data.format import write_records
from bert.data.records import Metadata, Records
from bert.data.synthetic import synthetic_records

VOCABULARY, LENGTH = 211, 48
# With a global batch of 12 rows.
TO_A_TARGET = {
    "DEVICE": "cpu", "MAX_SEQ_LENGTH": str(LENGTH), "LR": "0.05", "MAX_STEPS": "8", "NUM_EVAL_EXAMPLES": "17",
    "EVAL_ITER_START_SAMPLES": "24", "EVAL_ITER_SAMPLES": "24", "TARGET_MLM_ACCURACY": "0.3", "LOG_EVERY_STEPS": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def records(num_rows: int, packed: bool, seed: int) -> Records:
    """Synthetic records in which half the labels are one word, so that there is something to
    learn.
    """
    made = synthetic_records(num_rows, LENGTH, VOCABULARY, packed, seed)
    common = np.arange(len(made.masked_lm_ids)) % 2 == 0
    return dataclasses.replace(
        made, masked_lm_ids=np.where(common, 7, made.masked_lm_ids).astype(np.int16)
    )


def write(folder: Path) -> None:
    """Writes packed_data, eval and phase1 to the folder."""
    metadata = Metadata(
        max_seq_length=LENGTH, vocab_md5="0" * 32, random_seed=0, dupe_factor=1
    )
    for name in ("packed_data", "eval", "phase1"):
        (folder / name).mkdir()
    for shard in range(4):
        write_records(
            folder / "packed_data" / f"part_{shard:05d}_of_00004.hdf5", records(37, True, shard), metadata,
        )  # fmt: skip
    write_records(
        folder / "eval" / "part_eval_10k.hdf5", records(20, False, 9), metadata
    )
    model = {
        "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    }  # fmt: skip
    model |= {"intermediate_size": 40, "max_position_embeddings": LENGTH}
    (folder / "phase1" / "bert_config.json").write_text(json.dumps(model))
