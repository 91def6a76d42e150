"""The MLCommons reference: its TFRecords, its TensorFlow checkpoint and its evaluation set train and
evaluate here, and its TensorFlow 2 users take the weights back.
"""

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest
import torch

from ..input_preprocessing.checkpoints.bundle_writer import write_bert
from .conftest import STAGES, Shell, exported
from .foreign import MODEL, instances, model_files, tfrecord

CONVERT = "python -m input_preprocessing convert_checkpoint --bert-config phase1/bert_config.json"


@pytest.fixture
def reference(shell: Shell) -> Shell:
    """A folder with what the reference's README downloads and generates."""
    folder = shell.folder
    model_files(folder / "phase1")
    for name in ("tf1_ckpt", "tfrecord_dir", "eval"):
        (folder / name).mkdir()
    sizes = {name: size for name, size in MODEL.items() if isinstance(size, int)}
    write_bert(folder / "tf1_ckpt/model.ckpt-28252", sizes, seed=1)
    for part in range(3):
        path = folder / f"tfrecord_dir/part-{part:05d}-of-00500"
        tfrecord(path, instances(80, part))
    tfrecord(folder / "eval_intermediate", instances(60, 9))
    return shell


def test_their_files_are_taken_trained_on_and_evaluated(reference: Shell) -> None:
    shell, folder = reference, reference.folder
    done = shell.type(
        f"cd {folder}\n"
        f"{CONVERT} --source tf1_ckpt --target phase1/model.ckpt-28252.pt\n"
        f"{STAGES} import_records --source tfrecord_dir --target hdf5/training-4320 --vocab-file phase1/vocab.txt\n"
        "python -m input_preprocessing evalset --source eval_intermediate --target eval/part_eval_10k.hdf5 --num-samples 20\n"
    )
    assert "the benchmark's has 514,241,279" in done.stderr, "not its TFRecords"
    site = "source env.sh\nsource configs/config_DGXA100_1x8x56x1.sh\n"
    data = {"DATADIR": str(folder), "CHECKPOINT_DIR": str(folder / "saved")}
    own = exported(EXCHANGE_GROUP="2", **data)
    said = shell.type(f"{own}\n{site}python -m bert --check").stdout
    assert "3 files in" in said
    assert "whose number is unknown" in said
    done = shell.type(f"{own}\n{site}NEXP=1 ./run_local.sh")
    assert done.stderr.strip().endswith(f"the trial reached the target: {shell.results}")  # fmt: skip
    assert "compliance_checker passes" in shell.review("check")
    # Evaluation of one checkpoint, before and after.
    first = torch.load(folder / "phase1/model.ckpt-28252.pt")["model"]
    (last,) = sorted((folder / "saved").glob("step_*.pt"))[-1:]
    trained = torch.load(last, weights_only=True)["model"]
    assert not torch.equal(first["cls.predictions.bias"], trained["cls.predictions.bias"])  # fmt: skip
    accuracy = []
    for path in (folder / "phase1/model.ckpt-28252.pt", last):
        lines = f"{own}\n{site}python -m bert evaluate --json {path}"
        found = json.loads(shell.type(lines).stdout)
        accuracy.append(found["accuracy"])
    assert accuracy[0] < 0.3 <= accuracy[1]


def test_weights_go_to_tensorflow_2_and_back(reference: Shell) -> None:
    folder = reference.folder
    reference.type(
        f"cd {folder}\n"
        f"{CONVERT} --source tf1_ckpt --target tf2_ckpt/model.ckpt-28252 --names tensorflow2\n"
        f"{CONVERT} --source tf1_ckpt --target one.pt\n"
        f"{CONVERT} --source tf2_ckpt --target two.pt"
    )
    one, two = (torch.load(folder / f"{name}.pt")["model"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


RESTORE = """
import sys, numpy as np, tensorflow as tf
reader, top, found = tf.train.load_checkpoint(sys.argv[1]), tf.Module(), {}
for key, shape in reader.get_variable_to_shape_map().items():
    if key.startswith("model/"):
        node, *parts = top, *key.split("/")[1:-2]
        for part in parts[:-1]:
            node.__dict__.get(part) or setattr(node, part, tf.Module())
            node = getattr(node, part)
        found[key] = tf.Variable(tf.zeros(shape))
        setattr(node, parts[-1], found[key])
tf.train.Checkpoint(model=top).restore(sys.argv[1]).assert_consumed()
print(sum(variable.numpy().size for variable in found.values()), len(found))
assert all(np.array_equal(variable.numpy(), reader.get_tensor(key)) for key, variable in found.items())
"""


@pytest.mark.journey
def test_tensorflow_itself_restores_every_variable(reference: Shell, repository: Path) -> None:  # fmt: skip
    """As objects of those names: the official encoder's, which needs no package but TensorFlow."""
    home = repository / ".cache" / "tensorflow"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        install = [home / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q", "tensorflow-cpu==2.21.0"]  # fmt: skip
        if subprocess.run(install, check=False).returncode:
            pytest.skip("TensorFlow cannot be installed here")
        (home / "ready").touch()
    folder = reference.folder
    reference.type(f"cd {folder}\n{CONVERT} --source tf1_ckpt --target tf2_ckpt/model.ckpt-28252 --names tensorflow2")  # fmt: skip
    done = subprocess.run(
        [home / "bin/python", "-c", RESTORE, folder / "tf2_ckpt/model.ckpt-28252"],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "46"
