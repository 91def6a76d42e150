"""--check describes the run, and both judge by the same functions: what it accepts trains, what it
refuses the run refuses with the same line. For every kind of data, weights and settings that users
bring.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from bert.__main__ import main
from bert.data.format import write_records
from bert.data.records import Metadata, Records
from bert.data.synthetic import synthetic_records
from bert.pretraining import run
from input_preprocessing.checkpoints.convert import convert
from input_preprocessing.records.tfrecord_nvidia import import_file

from ...input_preprocessing.checkpoints.bundle_writer import write_bert
from ...input_preprocessing.tensorflow_files import test_tfrecord as tfrecord
from ..data.samples import write_nvidia

LENGTH, WORDS = 48, 211


def metadata(vocab_md5: str, length: int = LENGTH) -> Metadata:
    facts = {"random_seed": 0, "dupe_factor": 1}
    return Metadata(max_seq_length=length, vocab_md5=vocab_md5, **facts)


@dataclass
class Case:
    """A run on a user's files: change() of a case edits them and the environment."""

    folder: Path
    env: dict[str, str]

    def records(self, count: int = 60, packed: bool = True) -> Records:
        return synthetic_records(count, LENGTH, WORDS, packed, seed=3)

    def data(self, packed: bool = True) -> Path:
        """A new folder of training data."""
        folder = self.folder / "own data"
        folder.mkdir()
        name = "DATADIR_PHASE2_PACKED" if packed else "DATADIR_PHASE2"
        self.env |= {name: str(folder), "PACKED": str(int(packed))}
        self.env["PACKING_FACTOR"] = "2" if packed else "1"
        return folder

    def ours(self, records: Records, vocab_md5: str = "0" * 32, length: int = LENGTH) -> None:  # fmt: skip
        folder = self.data(records.row_offsets is not None)
        write_records(folder / "part_0.hdf5", records, metadata(vocab_md5, length))
        self.evaluation(vocab_md5)

    def evaluation(self, vocab_md5: str) -> None:
        path = Path(self.env["EVALDIR"]) / "part_eval_10k.hdf5"
        write_records(path, self.records(20, packed=False), metadata(vocab_md5))

    def nvidias(self, schema: str, suffix: str = ".hdf5") -> None:
        packed = schema in ("packed", "habana")
        path = self.data(packed) / f"part_00000{suffix}"
        write_nvidia(path, self.records(packed=packed), schema)
        # Of these widths, or of none, which is the benchmark's.
        self.widen(64 if schema == "fixed" else 512)

    def widen(self, length: int) -> None:
        self.model(max_position_embeddings=length)
        self.env["MAX_SEQ_LENGTH"] = str(length)

    def tfrecords(self, vocabulary: bool) -> None:
        """The reference's, imported."""
        records, source = self.records(packed=False), self.folder / "part.tfrecord"
        features = (tfrecord.features_of(records, i) for i in range(60))
        source.write_bytes(b"".join(map(tfrecord.frame, map(tfrecord.example, features))))  # fmt: skip
        words = None
        if vocabulary:
            from input_preprocessing.text.vocabulary import load

            words = load(self.vocabulary())
            self.evaluation(words.md5)
        self.widen(64)
        import_file(words, (source, self.data(packed=False) / "part.hdf5"))

    def vocabulary(self) -> Path:
        """Of the model, beside it."""
        path = self.phase1 / "vocab.txt"
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(WORDS - 5))]  # fmt: skip
        path.write_text("\n".join(words) + "\n")
        return path

    @property
    def phase1(self) -> Path:
        return Path(self.env["CHECKPOINTDIR_PHASE1"])

    def model(self, **changed: object) -> dict[str, int]:
        path = self.phase1 / "bert_config.json"
        model: dict[str, int] = json.loads(path.read_text()) | changed
        path.write_text(json.dumps(model))
        return model

    def weights(self, change: Callable[[dict[str, Any]], object] = len) -> None:  # fmt: skip
        """TensorFlow's, converted, then changed."""
        write_bert(self.folder / "model.ckpt-1", self.model(), seed=1)
        path = self.folder / "model.pt"
        convert(self.folder / "model.ckpt-1", path, "mlperf")
        state = torch.load(path)
        change(state)
        torch.save(state, path)
        self.env["INIT_CHECKPOINT"] = str(path)


def with_ids(records: Records, value: int) -> Records:
    records.input_ids[5] = value
    return records


def spoilt(state: dict[str, Any]) -> None:
    state["model"]["bert.pooler.dense_act.bias"][3] = float("nan")


def checkpoint(case: Case, vocab_md5: str) -> None:
    """Of a run on data of a vocabulary, as its name says."""
    case.weights(lambda state: state.update(vocab_md5=vocab_md5))
    path = case.folder / "step_0000000001.pt"
    case.env["INIT_CHECKPOINT"] = str(Path(case.env["INIT_CHECKPOINT"]).rename(path))


def short(case: Case) -> None:
    case.ours(case.records())
    (path,) = Path(case.env["DATADIR_PHASE2_PACKED"]).glob("*")
    path.write_bytes(path.read_bytes()[:3000])


ALIKE: dict[str, tuple[bool, Callable[[Case], object]]] = {
    "our packed records": (True, lambda case: None),
    "NVIDIA's packed, beside vocab.txt": (True, lambda case: (case.vocabulary(), case.nvidias("packed", ""))),
    "NVIDIA's variable, beside vocab.txt": (True, lambda case: (case.vocabulary(), case.nvidias("variable"))),
    "NVIDIA's shuffled, no vocab.txt": (True, lambda case: case.nvidias("variable", ".hdf")),
    "NVIDIA's fixed": (True, lambda case: case.nvidias("fixed")),
    "Habana's packed": (True, lambda case: case.nvidias("habana")),
    "imported, vocabulary unknown": (True, lambda case: (case.vocabulary(), case.tfrecords(False))),
    "imported with a vocabulary": (True, lambda case: case.tfrecords(True)),
    "another vocabulary": (False, lambda case: (case.vocabulary(), case.ours(case.records()))),
    "the vocabulary": (True, lambda case: case.ours(case.records(), md5(case.vocabulary().read_bytes()).hexdigest())),
    "ids beyond the model": (False, lambda case: case.ours(with_ids(case.records(), WORDS))),
    "NVIDIA's ids beyond the model": (False, lambda case: (case.nvidias("packed"), case.model(vocab_size=100))),
    "unpacked, PACKED=1": (False, lambda case: (case.ours(case.records(packed=False)), case.env.update(
        PACKED="1", DATADIR_PHASE2_PACKED=case.env["DATADIR_PHASE2"]))),
    "longer than MAX_SEQ_LENGTH": (False, lambda case: case.ours(case.records(), length=64)),
    "too few rows": (False, lambda case: case.env.update(BATCHSIZE="999")),
    "a truncated file": (False, short),
    "no files": (False, lambda case: case.data()),
    "bins of no bins": (False, lambda case: (case.data(False), case.env.update(BATCHING="bins", BIN_COUNTS="1:2"))),
    "no evaluation set": (False, lambda case: case.env.update(EVALDIR=str(case.folder / "none"))),
    "an evaluation set too small": (False, lambda case: case.env.update(NUM_EVAL_EXAMPLES="99")),
    "dynamic masks without vocab.txt": (False, lambda case: case.env.update(MASKING="dynamic")),
    "TensorFlow's weights": (True, lambda case: case.weights()),
    "weights with NaN": (False, lambda case: case.weights(spoilt)),
    "weights without a tensor": (False, lambda case: case.weights(lambda state: state["model"].pop("bert.embeddings.LayerNorm.bias"))),
    "weights of another model": (False, lambda case: (case.weights(), case.model(num_hidden_layers=1))),
    "weights of another vocabulary": (False, lambda case: checkpoint(case, "1" * 32)),
    "weights of this vocabulary": (True, lambda case: checkpoint(case, "0" * 32)),
    "no weights": (False, lambda case: case.env.update(INIT_CHECKPOINT=str(case.folder / "none.pt"))),
    "moments of no checkpoint of ours": (False, lambda case: (case.weights(), case.env.update(INIT_OPTIMIZER="1"))),
    "a group that does not divide": (False, lambda case: (case.ours(case.records(packed=False)), case.env.update(
        EXCHANGE_GROUP="2"))),
    "an exchange of packed rows": (False, lambda case: case.env.update(
        PACKED="0", PACKING_FACTOR="1", EXCHANGE_GROUP="2", DATADIR_PHASE2=case.env["DATADIR_PHASE2_PACKED"])),
    "the closed division": (False, lambda case: case.env.update(SUBMISSION_DIVISION="closed", DEVICE="cpu")),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALIKE)
def test_what_check_accepts_trains_and_what_it_refuses_the_run_refuses_alike(
    kind: str, prepared: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    accepted, change = ALIKE[kind]
    few = {"MAX_STEPS": "2", "EVAL_ITER_START_SAMPLES": "1", "EVAL_ITER_SAMPLES": "6", "TARGET_MLM_ACCURACY": "0"}  # fmt: skip
    case = Case(tmp_path, prepared | few)
    change(case)
    judged = []
    for check_only in (True, False):
        status = run.run(case.env, check_only)
        judged.append((status, capsys.readouterr().err.strip().split("\n")[-1] if status else ""))  # fmt: skip
    assert judged[0] == judged[1]
    assert judged[0][0] == (0 if accepted else 2), judged[0][1]


def test_unknown_is_said_and_neither_good_nor_bad(prepared, tmp_path, capsys):
    case = Case(tmp_path, prepared)
    case.vocabulary()
    case.tfrecords(False)
    assert run.run(case.env, check_only=True) == 0
    (data,) = (line for line in capsys.readouterr().out.split("\n") if line.startswith("data"))  # fmt: skip
    assert "unknown vocabulary" in data
    assert "copies, whose number is unknown" in data


def test_the_check_describes_the_run(prepared, run_bert):
    done = run_bert(
        prepared, arguments=("--check",), status=0, WORLD_SIZE=2, EVAL_ITER_SAMPLES=24
    )
    lines = [line.partition("  ") for line in done.stdout.splitlines()]
    said = {name: value.strip() for name, _, value in lines}
    batch = "6 sequences = 3 rows x 1 accumulated x 1 ranks x packing factor 2"
    assert said["global batch"] == batch
    assert said["steps"].startswith("at most 8 (48 samples)")
    assert said["learning rate"].startswith("mlperf: 0.05 at step 1, ")
    # The open division may choose its interval.
    assert said["evaluation"] == "every 24 samples from 24, target 0.9"
    assert said["data"].startswith("3 files in ")
    assert "continuing has helped" not in said["data"], "it starts from scratch"
    ids = copies = 0
    for path in Path(prepared["DATADIR_PHASE2_PACKED"]).glob("*.hdf5"):
        with h5py.File(path) as file:
            ids += len(file["input_ids"])
            copies = file.attrs["dupe_factor"]
    told = re.search(r"a text of about ([\d,]+) tokens", said["data"])
    assert told is not None
    assert int(told[1].replace(",", "")) == pytest.approx(ids / copies, rel=0.05)
    assert said["attention"] == "sdpa_loop (the device is a CPU)"
    assert "GELU in its tanh form" in said["model"]


@pytest.mark.parametrize(
    ("launched", "ranks"),
    [({}, 8), ({"WORLD_SIZE": "2"}, 2), ({"EMULATE_RANKS": "4"}, 4)],
)  # fmt: skip
def test_a_check_in_a_shell_is_of_the_configs_run(prepared, capsys, launched, ranks):
    config = {"DGXNNODES": "2", "DGXNGPU": "4", "EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0"}  # fmt: skip
    assert main(["--check"], prepared | config | launched) == 0
    assert f" {ranks} ranks" in capsys.readouterr().out
