"""Small files in the layouts of other systems, made without this repository's writers."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import h5py
import numpy as np
import torch

WORDS = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # fmt: skip
WORDS += [f"word{i}" for i in range(211 - len(WORDS))]
CLS, SEP, MASK, FIRST = 101, 102, 103, 104
LENGTH, MASKS = 512, 76  # widths of the benchmark's files
MODEL = {
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 24,
    "initializer_range": 0.02, "intermediate_size": 40, "max_position_embeddings": 512, "num_attention_heads": 3,
    "num_hidden_layers": 2, "type_vocab_size": 2, "vocab_size": len(WORDS),
}  # fmt: skip


@dataclass(frozen=True)
class Instance:
    """What create_pretraining_data.py makes: a pair of sentences with masked words."""

    ids: list[int]
    segment_a: int  # tokens of it
    positions: list[int]
    labels: list[int]
    random_next: int


def instances(count: int, seed: int, longest: int = 40) -> list[Instance]:
    """Half of the masked words are one word, so that there is something to learn."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        length = int(rng.integers(8, longest + 1))
        ids = rng.integers(FIRST, len(WORDS), length)
        segment_a = int(rng.integers(3, length - 3))
        ids[0], ids[[segment_a - 1, -1]] = CLS, SEP
        words = np.setdiff1d(np.arange(1, length - 1), [segment_a - 1])
        masked = min(MASKS, max(1, round(length * 0.15)))
        positions = np.sort(rng.choice(words, masked, False))
        labels = np.where(np.arange(len(positions)) % 2, ids[positions], FIRST)
        ids[positions] = MASK
        made.append(Instance(ids.tolist(), segment_a, positions.tolist(), labels.tolist(), int(rng.integers(2))))  # fmt: skip
    return made


def segments(instance: Instance) -> list[int]:
    return [int(at >= instance.segment_a) for at in range(len(instance.ids))]


# --- the reference's


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)  # fmt: skip


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(path: Path, made: Sequence[Instance], length: int = LENGTH) -> None:
    """As TensorFlow's TFRecordWriter writes the reference's features."""
    pieces = []
    for one in made:
        masked = len(one.labels)
        features: dict[str, tuple[list[int], int]] = {
            "input_ids": (one.ids, length),
            "input_mask": ([1] * len(one.ids), length),
            "segment_ids": (segments(one), length),
            "masked_lm_positions": (one.positions, MASKS),
            "masked_lm_ids": (one.labels, MASKS),
            "next_sentence_labels": ([one.random_next], 1),
        }
        entries = b""
        for name, (values, width) in features.items():
            padded = values + [0] * (width - len(values))
            numbers = _field(3, _field(1, b"".join(map(_varint, padded))))
            entries += _field(1, _field(1, name.encode()) + _field(2, numbers))
        weights = struct.pack(f"<{MASKS}f", *[1.0] * masked, *[0.0] * (MASKS - masked))
        entries += _field(1, _field(1, b"masked_lm_weights") + _field(2, _field(2, _field(1, weights))))  # fmt: skip
        example = _field(1, entries)
        size = struct.pack("<Q", len(example))
        pieces += [size, _masked(size), example, _masked(example)]
    path.write_bytes(b"".join(pieces))


# --- NVIDIA's, Samsung's and Habana's


def _ragged(file: h5py.File, name: str, rows: Sequence[Sequence[int]], dtype: str) -> None:  # fmt: skip
    data = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        data[number] = np.array(row, dtype)
    file.create_dataset(name, data=data, dtype=h5py.vlen_dtype(np.dtype(dtype)))


def packed_shard(path: Path, rows: Sequence[Sequence[Instance]]) -> None:
    """As create_packed_trainset.py writes a part."""
    before = [np.cumsum([0, *(len(one.ids) for one in row)]) for row in rows]
    columns = {
        "input_ids": ("<i2", [[i for one in row for i in one.ids] for row in rows]),
        "segment_ids": ("i1", [[i for one in row for i in segments(one)] for row in rows]),
        "packed_input_len": ("<i2", [[len(one.ids) for one in row] for row in rows]),
        "masked_lm_positions": ("<i2", [
            [int(start) + at for one, start in zip(row, starts, strict=False) for at in one.positions]
            for row, starts in zip(rows, before, strict=True)]),
        "masked_lm_ids": ("<i2", [[i for one in row for i in one.labels] for row in rows]),
        "packed_masked_lm_len": ("<i2", [[len(one.labels) for one in row] for row in rows]),
        "next_sentence_labels": ("i1", [[one.random_next for one in row] for row in rows]),
    }  # fmt: skip
    with h5py.File(path, "w") as file:
        for name, (dtype, values) in columns.items():
            _ragged(file, name, values, dtype)


def variable_shard(path: Path, made: Sequence[Instance]) -> None:
    """As convert_fixed2variable.py writes a part, or the evaluation set."""
    with h5py.File(path, "w") as file:
        _ragged(file, "input_ids", [one.ids for one in made], "<i2")
        _ragged(file, "segment_ids", [segments(one) for one in made], "i1")
        _ragged(file, "masked_lm_positions", [one.positions for one in made], "<i2")
        _ragged(file, "masked_lm_ids", [one.labels for one in made], "<i2")
        file["next_sentence_labels"] = np.array([one.random_next for one in made], "i1")


def padded_shard(path: Path, made: Sequence[Instance], length: int, masks: int, copies: int = 1) -> None:  # fmt: skip
    """As their create_pretraining_data.py writes a part: every column padded, and compressed."""

    def table(rows: list[list[int]], width: int, dtype: str) -> np.ndarray:
        padded = [row + [0] * (width - len(row)) for row in rows]
        return np.tile(np.array(padded, dtype), (copies, 1))

    columns = {
        "input_ids": table([one.ids for one in made], length, "i4"),
        "input_mask": table([[1] * len(one.ids) for one in made], length, "i1"),
        "segment_ids": table([segments(one) for one in made], length, "i1"),
        "masked_lm_positions": table([one.positions for one in made], masks, "i4"),
        "masked_lm_ids": table([one.labels for one in made], masks, "i4"),
        "next_sentence_labels": table([[one.random_next] for one in made], 1, "i1")[:, 0],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, compression="gzip")


def model_files(phase1: Path) -> None:
    """vocab.txt and bert_config.json, as everybody downloads them."""
    phase1.mkdir(parents=True)
    (phase1 / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (phase1 / "bert_config.json").write_text(json.dumps(MODEL, indent=2))


def nvidia_checkpoint(path: Path) -> None:
    """As convert_tf_checkpoint.py saves it: {"model": ...} with its names, the vocabulary padded."""
    h, f, v = (int(MODEL[name]) for name in ("hidden_size", "intermediate_size", "vocab_size"))  # fmt: skip
    words, shapes = -(-v // 8) * 8, {}
    embeddings = {"word": words, "position": 512, "token_type": 2}
    dense = {"bert.pooler.dense_act": (h, h), "cls.predictions.transform.dense_act": (h, h), "cls.seq_relationship": (2, h)}  # fmt: skip
    norms = ["bert.embeddings", "cls.predictions.transform"]
    for layer in (f"bert.encoder.layer.{number}" for number in range(2)):
        dense |= {f"{layer}.attention.self.{name}": (h, h) for name in ("query", "key", "value")}  # fmt: skip
        dense |= {f"{layer}.attention.output.dense": (h, h), f"{layer}.intermediate.dense_act": (f, h), f"{layer}.output.dense": (h, f)}  # fmt: skip
        norms += [f"{layer}.attention.output", f"{layer}.output"]
    for name, rows in embeddings.items():
        shapes[f"bert.embeddings.{name}_embeddings.weight"] = (rows, h)
    for name, shape in dense.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(1)
    state = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}  # fmt: skip
    for name in norms:
        state |= {f"{name}.LayerNorm.weight": torch.ones(h), f"{name}.LayerNorm.bias": torch.zeros(h)}  # fmt: skip
    state["cls.predictions.bias"] = torch.zeros(words)
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]  # fmt: skip
    torch.save({"model": state}, path)
