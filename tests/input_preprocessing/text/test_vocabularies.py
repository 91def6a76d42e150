"""Vocabularies other than the benchmark's: cased ones, from text to training records."""

from __future__ import annotations

from pathlib import Path

import pytest

from bert import hub
from bert.data.format import open_records
from input_preprocessing.dataset import prepare
from input_preprocessing.instances.options import SamplingConfig, sampling_digest
from input_preprocessing.text import corpus, vocabulary
from input_preprocessing.verify.verdict import verify

from ..conftest import all_records, made_up_documents, prepare_options


def original_words(folder: Path) -> set[str]:
    """The tokens that the training records hold or ask for, but special ones."""
    words = vocabulary.load(folder / "phase1" / "vocab.txt")
    records = all_records(folder / "packed_data")
    ids = {*records.input_ids.tolist(), *records.masked_lm_ids.tolist()}
    return {words.tokens[i] for i in ids if not words.tokens[i].startswith("[")}


def test_a_cased_preparation_keeps_capitals_and_accents_in_every_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [[sentence.replace("a", "\u00e1") for sentence in document] for document in made_up_documents(24)]
    corpus.write_text(tmp_path / "text", documents)
    line = ["--input", str(tmp_path / "text"), "--vocab-size", "500", "--packed-data"]
    for case, name in (("0", "cased"), ("1", "uncased")):
        prepare.prepare(prepare_options(tmp_path / name, *line, "--do-lower-case", case))
    assert "warning" not in capsys.readouterr().err
    cased, uncased = (original_words(tmp_path / name) for name in ("cased", "uncased"))
    assert any(word[0].isupper() for word in cased)
    assert any("\u00e1" in word for word in cased)
    assert all(word == word.lower() and "\u00e1" not in word for word in uncased)
    for name, lower in (("cased", False), ("uncased", True)):
        assert hub.lower_case(tmp_path / name / "phase1" / "vocab.txt") is lower
        assert (tmp_path / name / "phase1" / "tokenizer_config.json").exists() is not lower
    assert not [check for check in verify(tmp_path / "cased", jobs=1)["packed"] if check.holds is False]
    prepare.prepare(prepare_options(tmp_path / "cased", *line, "--do-lower-case", "0"))
    assert "nothing to do" in capsys.readouterr().err
    digest = open_records(tmp_path / "cased" / "eval" / "part_eval_10k.hdf5")[1].content_digest
    # The corpus stage makes an uncased vocabulary for the same folder, and all is made again.
    prepare.prepare(prepare_options(tmp_path / "cased", *line))
    assert original_words(tmp_path / "cased") == uncased
    assert open_records(tmp_path / "cased" / "eval" / "part_eval_10k.hdf5")[1].content_digest != digest
    assert not (tmp_path / "cased" / "phase1" / "tokenizer_config.json").exists()


@pytest.mark.parametrize(
    ("tokens", "lower_case", "warning"),
    [
        (["the", "[unused1]"], True, ""),
        (["the", "The"], False, ""),
        (["the", "The"], True, "1 tokens with capitals, and the text is lower-cased"),
        (["the", "[Q]"], False, "no token with a capital"),
    ],
)
def test_a_vocabulary_that_does_not_look_like_the_text_is_pointed_out(
    capsys: pytest.CaptureFixture[str], tokens: list[str], lower_case: bool, warning: str
) -> None:
    vocabulary.Vocabulary(("[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens), "").check_case(lower_case)
    said = capsys.readouterr().err
    assert warning in said
    assert bool(said) is bool(warning)


def test_what_was_made_before_there_was_a_choice_of_case_is_known_again() -> None:
    assert sampling_digest(SamplingConfig()) == "98045428e840d4f859113b4a622352d3"
    assert sampling_digest(SamplingConfig(do_lower_case=False)) != sampling_digest(SamplingConfig())
