"""Records, a model and settings of a run that reaches its target within seconds."""

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


# Folder: rows, packed and seed of each part.
DATA = {
    "packed_data": [(37, True, shard) for shard in range(4)],
    "eval": [(20, False, 9)],
}


def records(num_rows: int, packed: bool, seed: int) -> Records:
    """Synthetic records in which half the labels are one word, so that there is something to learn."""
    made = synthetic_records(num_rows, LENGTH, VOCABULARY, packed, seed)
    common = np.arange(len(made.masked_lm_ids)) % 2 == 0
    labels = np.where(common, 7, made.masked_lm_ids).astype(np.int16)
    return dataclasses.replace(made, masked_lm_ids=labels)


def write(folder: Path, data: dict[str, list[tuple[int, bool, int]]] = DATA) -> None:
    """Writes these records and phase1 to the folder."""
    own = {"max_seq_length": LENGTH, "vocab_md5": "0" * 32}
    metadata = Metadata(random_seed=0, dupe_factor=1, **own)
    for name in (*data, "phase1"):
        (folder / name).mkdir()
    for name, parts in data.items():
        for number, part in enumerate(parts):
            file = f"part_{number:05d}_of_{len(parts):05d}.hdf5"
            write_records(folder / name / file, records(*part), metadata)
    model = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 3, "intermediate_size": 40}
    model |= {"max_position_embeddings": LENGTH}
    (folder / "phase1" / "bert_config.json").write_text(json.dumps(model))
