"""Small models, data and environments of fine-tuning."""

import json
import random
from pathlib import Path

import pytest
import torch

from bert.data.tokens import WordPiece
from bert.model.config import BertConfig
from finetune import models

from . import made_up
from .runs import train

COLOURS, YEARS = ["red", "blue"], list(range(1, 99))
SHAPE = BertConfig(vocab_size=len(made_up.VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                   intermediate_size=64, max_position_embeddings=48, hidden_dropout_prob=0.0,
                   attention_probs_dropout_prob=0.0, initializer_range=0.1)  # fmt: skip


def article(generator, number):
    """A paragraph with two questions, answered by telling colours from numbers."""
    animal = generator.choice(["cat", "dog"])
    place = generator.choice(["lake", "river", "house"])
    colour, year = generator.choice(COLOURS), generator.choice(YEARS)
    facts = [f"It was {colour}.", f"It was {year} old.", f"It sat at the {place}."]
    generator.shuffle(facts)
    context = f"There is a {animal} here. " + " ".join(facts)
    asked = {"Who is red and blue?": colour, "When was it old?": str(year)}
    qas = []
    for question, answer in asked.items():
        given = {"text": answer, "answer_start": context.index(f"was {answer}") + 4}
        name = f"{number}-{question[:4]}"
        qas.append({"id": name, "question": question, "answers": [given]})
    return {"context": context, "qas": qas}


@pytest.fixture(scope="session")
def squad_environment(tmp_path_factory):
    """Environment with a synthetic set in SQuAD's format and random weights, without RUN_DIR."""
    folder = tmp_path_factory.mktemp("squad")
    generator = random.Random(1)
    for name, count in (("train", 150), ("dev", 30)):
        paragraphs = [article(generator, number) for number in range(count)]
        content = {"version": "1.1", "data": [{"title": "x", "paragraphs": paragraphs}]}
        (folder / f"{name}-v1.1.json").write_text(json.dumps(content))
    (folder / "vocab.txt").write_text("\n".join(made_up.VOCABULARY), encoding="utf-8")
    model = made_up.model_of("squad", SHAPE, seed=0)
    (folder / "config.json").write_text(json.dumps(models.hugging_face_config(model)))
    torch.save(dict(model.named_parameters()), folder / "weights.pt")
    return {
        "TASK": "squad", "DATA": str(folder), "INIT_CHECKPOINT": str(folder / "weights.pt"), "DEVICE": "cpu",
        "BATCHSIZE": "12", "LR": "3e-3", "EPOCHS": "4", "MAX_SEQ_LENGTH": "48", "LOG_EVERY_STEPS": "50", "SEED": "3",
        "OMP_NUM_THREADS": "1",  # in this process as in others: sums over threads round otherwise
    }  # fmt: skip


@pytest.fixture(scope="session")
def learnt(squad_environment, tmp_path_factory):
    """The folder of a run that is long enough to learn the answers; not to be changed."""
    return train(squad_environment, tmp_path_factory.mktemp("learnt")).parent


@pytest.fixture(scope="session")
def tokenizer(squad_environment):
    return WordPiece(Path(squad_environment["DATA"]) / "vocab.txt")
