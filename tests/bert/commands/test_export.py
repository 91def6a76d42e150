"""Hugging Face both ways: its classes load what bert export writes, and runs start from models of the Hub."""

import dataclasses
import hashlib
import json
import shutil

import numpy as np
import pytest
import torch

from bert.__main__ import main
from bert.checkpoint import huggingface
from bert.checkpoint.weights import load_weights
from bert.commands import weights as trained
from bert.data.batch import make_batch
from bert.pretraining import check
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env

from ..states import newest, save_in_shards, save_model

transformers = pytest.importorskip("transformers")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "paris", "is", "the", "of", "france", ".", "capital", "##s"]
WORDS += [f"w{n}" for n in range(198)]


@pytest.fixture
def vocab_file(tmp_path):
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return path


@pytest.fixture
def shape(request, tiny):
    return dataclasses.replace(tiny, hidden_act=getattr(request, "param", "gelu_erf"))


@pytest.fixture
def run(shape, make_model, vocab_file, tmp_path):
    """The folder of a run with two checkpoints, and the model of the newest."""
    md5 = hashlib.md5(vocab_file.read_bytes()).hexdigest()
    folder = tmp_path / "results" / "mine"
    for steps in (1, 2):
        model = make_model(shape, seed=steps, dtype=torch.float32)
        save_model(folder / "checkpoints", model, steps, vocab_md5=md5)
    settings = {"checkpoint": {"directory": str(folder / "checkpoints")}}
    settings["phase1"] = str(vocab_file.parent)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, model.eval()


def export(source, target, *more):
    return main(["export", *map(str, (source, "-o", target, *more))], {"DEVICE": "cpu"})


@pytest.mark.parametrize("shape", ["gelu", "gelu_erf"], indirect=True)
def test_hugging_face_scores_an_export_alike(run, make_records, tmp_path, capsys):
    folder, model = run
    target = tmp_path / "my-bert"
    assert export(folder, target) == 0
    assert "after 2 steps; GELU in its" in capsys.readouterr().err
    said = json.loads((target / "config.json").read_text())
    act = "gelu_new" if model.config.gelu_approximation == "tanh" else "gelu"
    expected = {"model_type": "bert", "architectures": ["BertForPreTraining"]}
    assert said | expected | {"hidden_act": act} == said
    load = transformers.AutoModelForPreTraining.from_pretrained
    reference, info = load(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    records = make_records(5, packed=False)
    for sequence in range(3):
        batch = make_batch(records, np.array([sequence]), 48)
        ids, kinds = batch.input_ids.long()[None], batch.segment_ids.long()[None]
        with torch.no_grad():
            ours = model.scored(batch)
            theirs = reference.eval()(ids, token_type_ids=kinds)
        mlm = theirs.prediction_logits[0, batch.masked_positions.long()]
        torch.testing.assert_close(ours.mlm, mlm, atol=1e-5, rtol=1e-5)
        nsp = theirs.seq_relationship_logits
        torch.testing.assert_close(ours.nsp, nsp, atol=1e-5, rtol=1e-5)
    encoder = transformers.AutoModel.from_pretrained(target)
    words = model.bert.embeddings.word_embeddings.weight[:211]
    assert torch.equal(encoder.embeddings.word_embeddings.weight, words)
    first = folder / "checkpoints" / "step_0000000001.pt"
    assert export(first, target) == 0, "over the other"


def test_a_checkpoint_in_shards_is_exported_as_one_in_a_file(run, tmp_path):
    folder, model = run
    assert export(folder, tmp_path / "of_file") == 0
    md5 = newest(folder / "checkpoints")["vocab_md5"]
    path = save_in_shards(folder / "checkpoints", model, 3, vocab_md5=md5)
    for number, given in enumerate((folder, path)):
        made = tmp_path / f"of_{number}"
        assert export(given, made) == 0
        for file in ("model.safetensors", "config.json", "vocab.txt"):
            expected = (tmp_path / "of_file" / file).read_bytes()
            assert (made / file).read_bytes() == expected


@pytest.mark.parametrize("form", ["whole", "encoder", "classifier", "sharded", "bin"])
def test_a_model_of_the_hub_starts_a_run(form, run, prepared, make_model, tmp_path):
    """Folder or file; heads may be missing, and others present; its config.json is the model's."""
    (source, model), folder = run, tmp_path / "hub"
    assert export(source, folder) == 0
    kinds = {"encoder": transformers.BertModel}
    kinds["classifier"] = transformers.BertForSequenceClassification
    theirs = kinds.get(form, transformers.BertForPreTraining).from_pretrained(folder)
    shutil.rmtree(folder)
    if form == "bin":
        folder.mkdir()
        theirs.config.to_json_file(folder / "config.json", use_diff=False)
        torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    else:
        size = "10KB" if form == "sharded" else "1GB"
        theirs.save_pretrained(folder, max_shard_size=size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) is (form == "sharded")
    environ = prepared | {"INIT_CHECKPOINT": str(folder)}
    config = from_env(PretrainingConfig, environ)
    config.checkpoint.check()
    assert config.model == model.config, "the GELU form too"
    file = {"INIT_CHECKPOINT": str(config.checkpoint.init_checkpoint)}
    assert from_env(PretrainingConfig, prepared | file).model == model.config
    target = make_model(config.model, seed=5, dtype=torch.float32)
    drawn = {name: p.clone() for name, p in target.named_parameters()}
    path, new_heads = config.checkpoint.init_checkpoint, config.may_have_new_heads
    loaded = load_weights(target, path, new_heads)
    heads = [name for name in drawn if name.startswith("cls.")]
    assert loaded.new == (heads if form in kinds else [])
    unused = ["classifier.bias", "classifier.weight"]
    assert loaded.unused == (unused if form == "classifier" else [])
    saved = dict(model.named_parameters())
    for name, parameter in target.named_parameters():
        expected = drawn[name] if name in loaded.new else saved[name]
        assert torch.equal(parameter[:211], expected[:211]), name
    closed = from_env(PretrainingConfig, environ | {"SUBMISSION_DIVISION": "closed"})
    if form in kinds:
        with pytest.raises(ConfigError, match=r"cls\.predictions\.bias is missing"):
            load_weights(target, path, closed.may_have_new_heads)


def test_the_check_says_which_heads_are_new(run, prepared, tmp_path):
    shape = huggingface.config_values(run[1].config, "BertModel")
    model = transformers.BertModel(transformers.BertConfig(**shape))
    model.save_pretrained(tmp_path / "hub")
    environ = prepared | {"INIT_CHECKPOINT": str(tmp_path / "hub")}
    said = check.report(from_env(PretrainingConfig, environ))
    (weights,) = [line for line in said.splitlines() if line.startswith("weights")]
    assert "model.safetensors: new cls.predictions.bias, " in weights
    assert weights.endswith("not used none")


def test_an_export_that_was_killed_is_done_again_and_leaves_nothing(run, tmp_path):
    left = tmp_path / "killed"
    left.mkdir()
    # Ours, and safetensors' own.
    for name in (".model.safetensors.partial", ".tmpAbCdEf"):
        (left / name).write_bytes(b"half")
    assert export(run[0], left) == 0
    names = sorted(path.name for path in left.iterdir())
    expected = "config.json model.safetensors tokenizer_config.json vocab.txt"
    assert " ".join(names) == expected


def test_wrong_exports_are_one_line(run, vocab_file, tmp_path, capsys):
    folder, new, full = run[0], tmp_path / "new", tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").touch()
    other, large = tmp_path / "other.txt", tmp_path / "large.txt"
    other.write_text("\n".join(reversed(WORDS)))
    large.write_text("\n".join([*WORDS, "one"]))
    cases = [
        ((tmp_path / "none", new), "no such file or folder"),
        ((full, new), "no step_* and no model.safetensors"),
        ((folder, full), "exists and holds no model"),
        ((folder, new, "--vocab", other), "the model was trained with"),
        ((folder, new, "--vocab", large), "212 words, and the model 211"),
        ((folder, new, "--vocab", tmp_path / "x.txt"), "cannot read the vocabulary"),
        ((folder, new), "its vocab.txt is not found: give it by --vocab"),
    ]
    for arguments, message in cases:
        if arguments == (folder, new):
            vocab_file.unlink()
        assert export(*arguments) == 2, message
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    assert not new.exists()


def test_the_latest_phase_of_a_two_phase_run_is_taken(run, tmp_path):
    folder, _ = run
    for phase in ("phase1", "phase2"):
        shutil.copytree(folder, tmp_path / "two" / phase)
    for phase in ("phase2", "phase1"):
        last = tmp_path / "two" / phase / "checkpoints" / "step_0000000002.pt"
        assert trained.find(tmp_path / "two")[-1] == last
        shutil.rmtree(tmp_path / "two" / phase)


@pytest.mark.parametrize(("extra", "lower"), [("w", True), ("W", False)])
def test_a_cased_vocabulary_is_known_by_its_words(extra, lower, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "the", extra]))
    assert huggingface.lower_case(tmp_path / "vocab.txt") is lower
    text = json.dumps({"do_lower_case": not lower})
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert huggingface.lower_case(tmp_path / "vocab.txt") is not lower


def test_what_a_tokenizers_config_says_stays_but_for_the_casing(tiny, tmp_path):
    (vocab := tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    given = {"strip_accents": False, "model_max_length": 12, "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    expected = given | {"do_lower_case": False, "tokenizer_class": "BertTokenizer"}
    for target in (tmp_path / "out", tmp_path):
        huggingface.write(target, {}, tiny, {}, vocab, lower_case=False)
        written = json.loads((target / "tokenizer_config.json").read_text())
        assert written == expected
