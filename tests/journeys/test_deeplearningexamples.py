"""NVIDIA DeepLearningExamples' PyTorch/LanguageModeling/BERT, as its users type it, on their files.

| there | here |
|---|---|
| scripts/run_pretraining.sh | run_pretraining.sh, both phases |
| scripts/run_pretraining_inference.sh | python -m bert evaluate |
| scripts/run_squad.sh ... "train eval" | run_finetuning.sh squad |
| scripts/run_squad.sh ... prediction | run_finetuning.sh squad MODE=prediction |
| the latency tables of its README | python -m finetune benchmark |
"""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from .foreign import Instance, padded_shard

ANIMALS, COLOURS = ["cat", "dog", "fish", "king"], ["red", "blue", "black", "old"]
PLACES = ["lake", "river", "house", "forest"]
WORDS = ["the", "was", "at", "and", "what", "where", "how", ".", "?"]
WORDS += [*ANIMALS, *COLOURS, *PLACES]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
PAD, UNK, CLS, SEP, MASK = range(5)
# The names that create_datasets_from_start.sh gives.
SHARDS = (
    "hdf5_lower_case_1_seq_len_{length}_max_pred_{masks}_masked_lm_prob_0.15_"
    "random_seed_12345_dupe_factor_5/books_wiki_en_corpus/{split}"
)


def sentence(generator: random.Random) -> str:
    animal, colour, place = map(generator.choice, (ANIMALS, COLOURS, PLACES))
    return f"the {animal} was {colour} and was at the {place} ."


def instance(length: int, masks: int, number: int, generator: random.Random) -> Instance:  # fmt: skip
    half = (length - 3) // 2 // 11  # sentences of 11 tokens
    texts = [" ".join(sentence(generator) for _ in range(generator.randint(1, half))) for _ in "ab"]  # fmt: skip
    a, b = ([VOCABULARY.index(word) for word in text.split()] for text in texts)
    ids = [CLS, *a, SEP, *b, SEP]
    places = [i for i, token in enumerate(ids) if token not in (CLS, SEP)]
    chosen = sorted(generator.sample(places, min(masks, len(places) * 15 // 100)))
    masked = [MASK if i in chosen else token for i, token in enumerate(ids)]
    return Instance(masked, len(a) + 2, chosen, [ids[i] for i in chosen], number % 2)


def write_squad(path: Path, count: int, generator: random.Random) -> None:
    paragraphs = []
    for number in range(count):
        context = " ".join(sentence(generator).capitalize() for _ in range(3))
        animal, colour = context.split()[1], context.split()[3]
        answer = {"text": colour, "answer_start": context.index(colour)}
        question = {"id": f"q{number}", "question": f"What was the {animal} ?"}
        paragraphs.append(
            {"context": context, "qas": [question | {"answers": [answer]}]}
        )
    content = {"version": "1.1", "data": [{"title": "Lake", "paragraphs": paragraphs}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """What lies in /workspace/bert of its container: data, vocab/ with the model's shape."""
    folder, generator = tmp_path_factory.mktemp("workspace"), random.Random(1)
    for length, masks in ((128, 20), (512, 80)):
        for split, count in (("training", 3), ("test", 1)):
            place = SHARDS.format(length=length, masks=masks, split=split)
            for number in range(count):
                name = f"books_wiki_en_corpus_{split}_{number}.hdf5"
                path = folder / "data" / place / name
                made = [instance(length, masks, n, generator) for n in range(64)]
                padded_shard(path, made, length, masks)
    squad = folder / "data" / "download" / "squad" / "v1.1"
    write_squad(squad / "train-v1.1.json", 300, generator)
    write_squad(squad / "dev-v1.1.json", 40, generator)
    (folder / "vocab").mkdir()
    (folder / "vocab" / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    shape = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "intermediate_size": 64, "hidden_act": "gelu"}
    shape |= {"max_position_embeddings": 512, "type_vocab_size": 2}
    shape |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "vocab" / "bert_config.json").write_text(json.dumps(shape))
    return folder


@pytest.fixture(scope="module")
def type_in(workspace, repository, quick_python):
    """Types lines into one user's shell; returns what they print."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(workspace), "DEVICE": "cpu"}
    environ |= {"PYTHON": str(quick_python), "W": str(workspace), "NCCL_TEST": "0"}
    environ |= {"OMP_NUM_THREADS": "1", "LOGDIR": str(workspace / "results")}

    def run(lines: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", lines], cwd=repository, env=environ,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def pretrained(type_in, workspace):
    """scripts/run_pretraining.sh: its recipe for one GPU, of small batches and few steps."""
    type_in("""
        for length in 128/20 512/80; do
          mkdir -p "$W/bert/${length%/*}/hdf5"
          ln -s "$W"/data/hdf5_*_seq_len_"${length%/*}"_max_pred_"${length#*/}"_*/*/training "$W/bert/${length%/*}/hdf5/training"
        done
        export DATADIR=$W/bert CHECKPOINTDIR_PHASE1=$W/vocab PACKED=0
        source env.sh
        export BATCHSIZE=8 GRADIENT_STEPS=2 LR=0.01 SEED=1 MAX_STEPS=30 CHECKPOINT_EVERY_STEPS=15
        ./run_pretraining.sh configs/pretrain_large_H100_1x1 --check
        ./run_pretraining.sh configs/pretrain_large_H100_1x1
    """)
    return workspace / "results" / "pretrain_large_H100_1x1"


def metrics(folder: Path, kind: str) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics_0.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_his_shards_train_both_phases_the_second_from_the_first(pretrained):
    for phase in ("phase1", "phase2"):
        steps = metrics(pretrained / phase, "train")
        assert steps[-1]["step"] == 30
        assert steps[-1]["loss"] < steps[0]["loss"]
        assert steps[-1]["samples"] == 30 * 16
    first = metrics(pretrained / "phase2", "train")[0]
    before = metrics(pretrained / "phase1", "train")
    assert first["loss"] < before[0]["loss"], "phase 2 starts where phase 1 ended"


def test_pretraining_inference_gives_loss_accuracy_and_speed(pretrained, type_in):
    out = type_in("""
        export PYTHONPATH=implementations
        EVALDIR=$(echo "$W"/data/hdf5_*_seq_len_512_*/*/test) \\
          "$PYTHON" -m bert evaluate "$LOGDIR/pretrain_large_H100_1x1" --json
    """)
    *_, last = map(json.loads, out.splitlines())
    assert (last["steps"], last["sequences"]) == (30, 64)
    assert 0 < last["accuracy"] <= 1
    assert last["sequences_per_second"] > 0


@pytest.fixture(scope="module")
def squad(pretrained, type_in, workspace):
    """scripts/run_squad.sh with its own values of length, stride and n-best, mode "train eval"."""
    type_in("""
        ./run_finetuning.sh squad INIT_CHECKPOINT="$LOGDIR/pretrain_large_H100_1x1/phase2/checkpoints" \\
          BERT_CONFIG="$W/vocab/bert_config.json" DATA="$W/data/download/squad/v1.1" RUN_NAME=squad SEED=1 \\
          BATCHSIZE=12 LR=3e-3 WARMUP_PROPORTION=0.1 EPOCHS=10 MAX_SEQ_LENGTH=64 \\
          DOC_STRIDE=16 MAX_QUERY_LENGTH=24 N_BEST_SIZE=10 MAX_ANSWER_LENGTH=4 OPTIMIZER=bertadam
    """)
    return workspace / "results" / "squad" / "model_0"


def exact_match(dev: Path, predictions: Path) -> float:
    """Of evaluate-v1.1.py, for answers of one word."""
    said = json.loads(predictions.read_text())
    article, *_ = json.loads(dev.read_text())["data"]
    questions = [q for paragraph in article["paragraphs"] for q in paragraph["qas"]]
    hits = [said[q["id"]].lower() == q["answers"][0]["text"] for q in questions]
    return 100 * sum(hits) / len(hits)


def test_squad_is_learnt_predicted_and_scored(squad, workspace):
    figures = json.loads((squad / "figures.json").read_text())
    dev = workspace / "data" / "download" / "squad" / "v1.1" / "dev-v1.1.json"
    assert figures["exact_match"] == exact_match(dev, squad / "predictions.json") > 50
    assert figures["f1"] >= figures["exact_match"]
    n_best = json.loads((squad / "nbest_predictions.json").read_text())
    assert max(map(len, n_best.values())) == 10
    assert figures["inference_sequences_per_second"] > 0


def test_a_file_without_answers_is_predicted(squad, type_in, workspace):
    """Mode "prediction", with --predict_file."""
    dev = workspace / "data" / "download" / "squad" / "v1.1" / "dev-v1.1.json"
    content = json.loads(dev.read_text())
    for paragraph in content["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            del question["answers"]
    (workspace / "mine.json").write_text(json.dumps(content))
    type_in("""
        ./run_finetuning.sh squad MODE=prediction INIT_CHECKPOINT="$LOGDIR/squad/model_0" DATA="$W/mine.json" RUN_NAME=mine
    """)
    again = workspace / "results" / "mine" / "model_0" / "predictions.json"
    assert again.read_bytes() == (squad / "predictions.json").read_bytes()


def test_the_latency_table_has_a_row_for_each_batch(squad, type_in):
    out = type_in("""
        export PYTHONPATH=implementations
        "$PYTHON" -m finetune benchmark "$LOGDIR/squad" --batch-sizes 1 8 --batches 3
    """)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["batch_size"], row["tokens"]) for row in rows] == [(1, 64), (8, 64)]
    for row in rows:
        assert 0 < row["p50"] <= row["p90"] <= row["p95"] <= row["p99"] <= row["p100"]
        assert row["sequences_per_second"] > 0
