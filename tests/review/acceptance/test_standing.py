"""Estimated time to train and its place among published results, or why there is nothing to
compare.
"""

from __future__ import annotations

import json

import pytest

from review.__main__ import main
from review.acceptance.verdict import standing
from review.rulebook.rcp import find
from review.rulebook.rules import table

from .made_up import STEP_SECONDS, WAIT_SECONDS, make, write

BERT_LARGE = table("benchmark_settings")["model"]
STEP = STEP_SECONDS + WAIT_SECONDS
CONFIG = {
    "model": BERT_LARGE,
    "data": {
        "batch_size": 48,
        "gradient_steps": 1,
        "packing_factor": 2,
        "max_seq_length": 512,
    },
}


@pytest.fixture
def server(tmp_path):
    """server(config, ...): the records of eight ranks on one node, in a folder."""

    def made(config, **changes):
        write(tmp_path, make(1, 8, **changes))
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return made


def judged(folder, capsys):
    """Exit status and printed lines."""
    status = main(["certify", str(folder)])
    return status, capsys.readouterr().out.splitlines()


def test_the_time_to_train_is_at_the_end_of_text_json_and_page(server, capsys):
    folder = server(CONFIG)
    status, lines = judged(folder, capsys)
    assert (status, lines[-1]) == (0, "pass")
    assert lines[-2].startswith("  where this stands: about ")
    assert "at batch 768 as the reference converges, " in lines[-2]
    assert (
        main(["certify", str(folder), "--json", "-o", str(folder / "page.html")]) == 0
    )
    found = json.loads(capsys.readouterr().out)["standing"]
    steps = found["minutes"] * 60 / STEP / (1 + 10_000 / 150_000)
    assert steps * 768 == pytest.approx(find(768)[0].mean, rel=0.03)
    assert (found["batch_size"], found["accelerators"]) == (768, 8)
    assert found["text"] in lines[-2]
    assert f"<p>A{found['text'][1:]}.</p>" in (folder / "page.html").read_text()


def test_a_slower_step_or_a_longer_wait_lengthens_the_time_to_train(server):
    from review.acceptance.records import read

    found = [
        standing(read(server(CONFIG, **changes))).minutes
        for changes in (
            {},
            {"network": 3.0},
            {"slow": {("together", rank): 1.5 for rank in range(8)}},
        )
    ]
    assert found[1] / found[0] == pytest.approx(
        (STEP_SECONDS + 3 * WAIT_SECONDS) / STEP, rel=0.02
    )
    assert found[2] / found[0] == pytest.approx(
        (1.5 * STEP_SECONDS + WAIT_SECONDS) / STEP, rel=0.02
    )


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (CONFIG, {"starved": {}}, "this test was of CPUs"),
        (CONFIG | {"model": BERT_LARGE | {"num_hidden_layers": 4}}, {}, "this was another model"),
        (CONFIG | {"data": CONFIG["data"] | {"max_seq_length": 128}}, {}, "this was another model"),
        ({}, {}, "this was another model"),
    ],
    ids=["CPUs", "small model", "short rows", "no settings"],
)  # fmt: skip
def test_cpus_and_other_models_have_nothing_to_compare_with(
    server, capsys, config, changes, words
):
    _, lines = judged(server(config, **changes), capsys)
    assert lines[-2].startswith("  where this stands: nothing to compare with: ")
    assert words in lines[-2]
