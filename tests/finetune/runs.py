"""Runs of fine-tuning, in this process and in others, and what they have written."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.__main__ import main
from finetune.train import run

from ..forked import Command
from ..waiting import free_ports


def train(environment, folder, **settings):
    """Runs with these settings, too, which has to succeed; the folder of the model."""
    assert run({**environment, "RUN_DIR": str(folder), **settings}) == 0
    return folder / f"model_{settings.get('TRIAL', 0)}"


def evaluate(environment, folder, model, mode="eval", **settings):
    """As ``train``, of a model that is there."""
    own = {"MODE": mode, "INIT_CHECKPOINT": str(model)}
    return train(environment, folder, **own, **settings)


def command(name, model, *words):
    """The exit status of ``python -m finetune NAME MODEL ...``."""
    return main([name, str(model), *map(str, words), "--device", "cpu"], {})


def predict(model, source, target, *more):
    return command("predict", model, "--input", source, "--output", target, *more)


def content(path):
    return json.loads(path.read_text())


def figures_of(model):
    return content(model / "figures.json")


def lines_of(path):
    """The objects of a file of JSON Lines."""
    return [*map(json.loads, path.read_text().splitlines())]


def table_of(path, separator="\t"):
    """The cells of each row."""
    return [line.split(separator) for line in path.read_text().splitlines()]


# Their last word is easily told from the others.
SENTENCES = [
    f"the {a} {b} was {c}"
    for a in ("old", "new", "happy")
    for b in ("cat", "dog", "king")
    for c in ("red", "blue", "north", "here")
]


def copied(weights, folder, *names):
    """The setting of a copy of the weights that has only these files beside it."""
    for name in names:
        shutil.copy(Path(weights).with_name(name), folder)
    return {"INIT_CHECKPOINT": str(folder / "weights.pt")}


def write_tables(folder, rows, names=("train.tsv", "dev.tsv")):
    for name in names:
        (folder / name).write_text("\n".join([*rows, ""]))


def exported(model, repository, folder, monkeypatch, kind="Sequence"):
    """A session of ONNX Runtime, of the model as docs/finetuning.md exports it, in the folder."""
    for name in ("transformers", "onnx"):
        pytest.importorskip(name)
    runtime = pytest.importorskip("onnxruntime")
    page = (repository / "docs" / "finetuning.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("results/<RUN_NAME>/model_0", str(model))
    monkeypatch.chdir(folder)
    exec(code.replace("SequenceC", f"{kind}C"), {})
    return runtime.InferenceSession("model.onnx")


def assert_the_losses_of(other, mine, samples):
    """The scores of each sample, which are, as its loss, those of transformers' model."""
    scores = mine.scores(samples, 2)
    for number, (ids, _) in enumerate(samples.sequences):
        labels = torch.from_numpy(samples.labels["labels"][number])[None]
        theirs = other(torch.tensor(ids[None]).long(), labels=labels)
        expected = theirs.logits[0].detach().numpy()
        np.testing.assert_allclose(scores[number], expected, atol=1e-5)
        loss = mine.model(samples.batch(np.array([number]))).label.item()
        assert loss == pytest.approx(theirs.loss.item(), abs=1e-5)
    return scores


def start(environment, rank=0, world_size=1, port=0):
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    own = {name: str(value) for name, value in settings.items()}
    return Command("finetune", {**os.environ, **environment, **own})


def finished(*environments):
    """What the ranks with these environments ended with."""
    port, count = free_ports(), len(environments)
    ranks = [start(each, rank, count, port) for rank, each in enumerate(environments)]
    return [rank.finish() for rank in ranks]
