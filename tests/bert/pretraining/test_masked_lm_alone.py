"""NSP=0: masked-LM alone trains, resumes, is evaluated and exported as BertForMaskedLM, without any word of pairs."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from bert.__main__ import main
from bert.checkpoint.weights import load_weights
from bert.data.batch import PretrainingCapacity
from bert.data.format import open_records, write_records
from bert.training.graph import graph_capacity, static_batch

from ..plain import NO_DROPOUT
from ..states import folders, newest, same

HEAD = ("bert.pooler.", "cls.seq_relationship.")


@pytest.fixture
def without_pairs(prepared: dict[str, str]) -> dict[str, str]:
    """The tiny run on records without pairs, its vocabulary beside the model."""
    vocabulary = Path(prepared["CHECKPOINTDIR_PHASE1"]) / "vocab.txt"
    special = "[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"
    words = [*special, *(f"w{number}" for number in range(206))]
    vocabulary.write_text("\n".join(words) + "\n")
    md5 = hashlib.md5(vocabulary.read_bytes()).hexdigest()
    for folder in ("DATADIR_PHASE2_PACKED", "EVALDIR"):
        for path in Path(prepared[folder]).iterdir():
            records, metadata = open_records(path)
            own = records.select(range(records.num_sequences))
            own = own.with_rows(records.row_offsets)
            lengths = own.sequence_lengths.astype(np.int16)
            own = dataclasses.replace(own, segment_b_start=lengths)
            write_records(path, own, dataclasses.replace(metadata, vocab_md5=md5))
    return prepared | {"NSP": "0"}


def test_a_run_without_pairs_says_nothing_of_them_and_resumes_bit_for_bit(
    without_pairs, run_bert, tmp_path
):
    def run(name: str, **more: str) -> str:
        settings = folders(tmp_path, name) | {"RESUME": "1", "TARGET_MLM_ACCURACY": "0"}
        return run_bert(without_pairs | settings | more, status=0).stderr

    said = run("whole")
    figures = (tmp_path / "run_whole" / "metrics_0.jsonl").read_text()
    assert "(mlm " in said
    for word in ("nsp", "next sentence"):
        assert word not in said + figures
    assert '"mlm_loss"' in figures
    run("parts", STEPS_THIS_RUN="3")
    run("parts")
    assert same(newest(tmp_path / "parts"), newest(tmp_path / "whole"))
    texts = said, run("fp8", PRECISION="fp8")
    losses = [float(re.findall(r"\(mlm ([\d.]+)", text)[-1]) for text in texts]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    names = newest(tmp_path / "whole")["model"]
    assert not [name for name in names if name.startswith(HEAD)]
    paired = run_bert(without_pairs, status=2, NSP=1, RUN_DIR=tmp_path / "paired")
    assert "no pairs of sentences (--nsp 0): set NSP=0" in paired.stderr


def test_what_it_trains_is_evaluated_exported_and_continued(
    without_pairs, run_bert, tmp_path, capsys
):
    run, mine = tmp_path / "run", tmp_path / "mine"
    settings = {"CHECKPOINT_DIR": run / "checkpoints", "TARGET_MLM_ACCURACY": "0"}
    checked = run_bert(without_pairs, arguments=("--check",), **settings)
    assert "masked-LM alone" in checked.stdout
    run_bert(without_pairs, status=0, **settings)
    assert main(["export", str(run), "-o", str(mine)], {}) == 0
    described = json.loads((mine / "config.json").read_text())
    assert described["architectures"] == ["BertForMaskedLM"]
    read = transformers.AutoModelForMaskedLM.from_pretrained
    _, info = read(mine, output_loading_info=True)
    assert not [*info["missing_keys"], *info["unexpected_keys"]]
    assert "NSP=0 trained no pooler: AutoModel" in capsys.readouterr().err
    names = "EVALDIR", "DEVICE", "OMP_NUM_THREADS"
    evaluated = {name: without_pairs[name] for name in names}
    assert main(["evaluate", str(run), str(mine)], evaluated) == 0
    titles, first, second = capsys.readouterr().out.splitlines()
    assert titles.split()[:5] == ["checkpoint", "steps", "accuracy", "mlm", "loss"]
    assert first.split()[4:6] == second.split()[4:6] == ["-", "-"], "no next sentences"
    assert first.split()[2:4] == second.split()[2:4]
    (mine / "vocab.txt").unlink()
    again = {"INIT_CHECKPOINT": mine, "RUN_DIR": tmp_path / "again"}
    run_bert(without_pairs, status=3, **again)


def test_a_model_of_pairs_is_continued_with_its_masked_lm_loss_alone(
    tiny, make_model, make_records, batch_of, tmp_path
):
    shape = dataclasses.replace(tiny, **NO_DROPOUT)
    whole = make_model(shape, dtype=torch.float32)
    torch.save(dict(whole.state_dict()), tmp_path / "whole.pt")
    shape = dataclasses.replace(shape, next_sentence=False)
    alone = make_model(shape, seed=1, dtype=torch.float32)
    loaded = load_weights(alone, tmp_path / "whole.pt")
    assert loaded.new == []
    known = dict(whole.named_parameters())
    unused = [name for name in known if name.startswith(HEAD)]
    assert sorted(loaded.unused) == sorted(unused)
    for name, p in alone.named_parameters():
        assert torch.equal(p, known[name]), name
    batch = batch_of(make_records(3, packed=False), [1])
    losses = alone(batch)
    assert losses._fields == ("mlm",)
    assert torch.equal(losses.mlm, whole(batch).mlm)
    room = graph_capacity(PretrainingCapacity(tokens=64, sequences=3, masked=16), 2)
    # Filled up, as for a CUDA graph.
    torch.testing.assert_close(alone(static_batch(batch, room)).mlm, losses.mlm)
    losses.mlm.backward()
    assert all(p.grad.abs().sum() > 0 for p in alone.parameters())
    scored = alone.scored(batch)
    assert scored.nsp is None
    torch.testing.assert_close(scored.mlm_losses.mean(), losses.mlm)
