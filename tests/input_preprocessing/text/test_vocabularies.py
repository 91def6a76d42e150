"""Vocabularies other than the benchmark's: cased and large ones, from text to training records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bert.checkpoint import huggingface
from bert.data.batch import gather_batch, make_batch
from bert.data.format import multiset_digest, open_records
from bert.data.synthetic import synthetic_records
from input_preprocessing.dataset import prepare
from input_preprocessing.instances import sampling
from input_preprocessing.instances.options import SamplingConfig, sampling_digest
from input_preprocessing.stage.cli import run_stage
from input_preprocessing.text import corpus, vocabulary
from input_preprocessing.text.tokenization import tokenize
from input_preprocessing.verify.verdict import verify

from ...bert.data.samples import make_records
from ...refused import refused
from ..conftest import all_records, made_up_documents, prepare_options, write_documents
from ..instances import oracle


def original_words(folder: Path) -> set[str]:
    """The tokens that the training records hold or ask for, but special ones."""
    words = vocabulary.load(folder / "phase1" / "vocab.txt")
    records = all_records(folder / "packed_data")
    ids = {*records.input_ids.tolist(), *records.masked_lm_ids.tolist()}
    return {words.tokens[i] for i in ids if not words.tokens[i].startswith("[")}


def test_a_cased_preparation_keeps_capitals_and_accents_in_every_stage(
    tmp_path, capsys
):
    documents = [
        [sentence.replace("a", "\u00e1") for sentence in document]
        for document in made_up_documents(24)
    ]
    write_documents(tmp_path / "text", documents)
    line = ["--input", str(tmp_path / "text"), "--vocab-size", "500", "--packed-data"]
    for case, name in (("0", "cased"), ("1", "uncased")):
        prepare.main(prepare_options(tmp_path / name, *line, "--do-lower-case", case))
    assert "warning" not in capsys.readouterr().err
    cased, uncased = (original_words(tmp_path / name) for name in ("cased", "uncased"))
    assert any(word[0].isupper() for word in cased)
    assert any("\u00e1" in word for word in cased)
    assert all(word == word.lower() and "\u00e1" not in word for word in uncased)
    for name, lower in (("cased", False), ("uncased", True)):
        assert huggingface.lower_case(tmp_path / name / "phase1" / "vocab.txt") is lower
        assert (
            tmp_path / name / "phase1" / "tokenizer_config.json"
        ).exists() is not lower
    assert not [
        check
        for check in verify(tmp_path / "cased", jobs=1)["packed"]
        if check.holds is False
    ]
    prepare.main(prepare_options(tmp_path / "cased", *line, "--do-lower-case", "0"))
    assert "nothing to do" in capsys.readouterr().err
    digest = open_records(tmp_path / "cased" / "eval" / "part_eval_10k.hdf5")[
        1
    ].content_digest
    # The corpus stage makes an uncased vocabulary for the same folder, and all is made again.
    prepare.main(prepare_options(tmp_path / "cased", *line))
    assert original_words(tmp_path / "cased") == uncased
    assert (
        open_records(tmp_path / "cased" / "eval" / "part_eval_10k.hdf5")[
            1
        ].content_digest
        != digest
    )
    assert not (tmp_path / "cased" / "phase1" / "tokenizer_config.json").exists()


@pytest.mark.parametrize(("tokens", "lower_case", "warning"), [
    (["the", "[unused1]"], True, ""),
    (["the", "The"], False, ""),
    (["the", "The"], True, "tokens with capitals: is --do-lower-case 1 right"),
    (["the", "[Q]"], False, "no tokens with capitals: is --do-lower-case 0"),
])  # fmt: skip
def test_a_vocabulary_that_does_not_look_like_the_text_is_pointed_out(
    capsys, tokens, lower_case, warning
):
    vocabulary.Vocabulary(
        ("[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens), ""
    ).check_case(lower_case)
    said = capsys.readouterr().err
    assert warning in said
    assert bool(said) is bool(warning)


def test_what_was_made_before_there_was_a_choice_of_case_is_known_again():
    assert sampling_digest(SamplingConfig()) == "98045428e840d4f859113b4a622352d3"
    assert sampling_digest(SamplingConfig(do_lower_case=False)) != sampling_digest(
        SamplingConfig()
    )


FILLERS = 40_000


@pytest.mark.slow  # compiles every stage for int32
def test_a_vocabulary_above_32_768_goes_from_text_to_training_batches(tmp_path):
    """The instances are the plain restatement's; shards, evaluation set, audit and batches have the
    same ids.
    """
    data = tmp_path / "data" / "download"
    (data / "results4").mkdir(parents=True)
    documents = made_up_documents(20)
    text = data / "results4" / "part-00000-of-00001"
    write_documents(text, documents)
    write_documents(data / "results4" / "eval.txt", documents[:2])
    corpus.train_vocabulary([text], 400, tmp_path / "small.txt")
    small = (tmp_path / "small.txt").read_text(encoding="utf-8").splitlines()
    tokens = [*small[:100], *(f"[unused{i}]" for i in range(FILLERS)), *small[100:]]
    (data / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    words = vocabulary.load(data / "vocab.txt")
    config = SamplingConfig(max_seq_length=64, dupe_factor=2)
    records, _ = sampling.instances_of(text, words, config)
    assert records.input_ids.dtype == records.masked_lm_ids.dtype == np.int32
    assert records.input_ids.max() > FILLERS > 32_768
    expected = oracle.make_instances(
        text.read_bytes(), words.ids, max_seq_length=64, dupe_factor=2
    )
    assert records.num_sequences == len(expected)
    for i, instance in enumerate(expected):
        start, end = records.sequence_offsets[i : i + 2]
        first, last = records.masked_lm_offsets[i : i + 2]
        assert [
            words.tokens[token] for token in records.input_ids[start:end]
        ] == instance.tokens
        assert [
            words.tokens[token] for token in records.masked_lm_ids[first:last]
        ] == instance.labels
    prepare.main(prepare_options(tmp_path / "data", "--packed-data", "--shards", "2"))
    rows = all_records(tmp_path / "data" / "packed_data")
    assert multiset_digest(rows) == multiset_digest(records)
    assert not [
        check
        for check in verify(tmp_path / "data", jobs=1)["packed"]
        if check.holds is False
    ]
    batch = make_batch(rows, np.arange(rows.num_sequences), 64)
    assert np.array_equal(batch.input_ids.numpy(), rows.input_ids)
    assert np.array_equal(batch.masked_labels.numpy(), rows.masked_lm_ids)
    narrow = make_records(3)
    mixed = gather_batch(
        [narrow, rows],
        [np.array([0, 2]), np.array([1])],
        np.array([1, 0, 2]),
        64,
        len(words),
    )
    assert int(mixed.input_ids.max()) <= len(words)
    assert mixed.num_sequences == 3


def test_made_up_records_of_a_large_vocabulary_have_its_ids():
    records = synthetic_records(50, 64, 120_000, True, 0)
    assert records.input_ids.min() >= 0
    assert records.input_ids.max() > 32_768
    assert records.masked_lm_ids.max() > 32_768


def test_half_a_million_tokens_are_distinguished_whole_and_in_pieces(monkeypatch):
    """As many as the largest multilingual BERTs have."""
    tokens = (
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *map(str, range(500_000)),
        "##a",
        "##ab",
    )
    words = vocabulary.Vocabulary(tokens, "")
    text = tokenize(b"499999 7 131068\n\n262143ab 500000 5a\n", words)
    assert [tokens[i] for i in text.tokens] == [
        "499999",
        "7",
        "131068",
        "262143",
        "##ab",
        "[UNK]",
        "5",
        "##a",
    ]
    assert text.tokens.dtype == np.int32
    monkeypatch.setattr(vocabulary, "NODE_MASK", 7)
    with refused("tokens have 9 bytes; at most 6 are allowed"):
        _ = vocabulary.Vocabulary(("[UNK]", "abcd"), "").trie


def test_words_that_the_tokenizer_does_not_know_are_not_learnt(tmp_path):
    """The trainer would take hours for such a word, and fill the vocabulary with its pieces."""
    text, target = tmp_path / "text", tmp_path / "vocab.txt"
    words = " ".join(
        word for d in made_up_documents(20) for s in d for word in s.split()
    )
    text.write_text(f"{words} -")
    corpus.train_vocabulary([text], 300, target)
    expected = target.read_text()
    text.write_text(f"{words} {'x' * 3_000_000} {'yz' * 101}-{'z' * 201}")
    corpus.train_vocabulary([text], 300, target)
    assert target.read_text() == expected
    text.write_text(f"{words} {'x' * 200} " * 9)
    corpus.train_vocabulary([text], 300, target)
    assert "xx" in target.read_text()


def test_the_share_of_sentences_that_no_sequence_holds_is_printed(
    tmp_path, monkeypatch, capsys
):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", *vocabulary.SPECIAL_TOKENS, *"a.!?:;"]))
    for count, told in ((124, ""), (125, "90.00% of the tokens are in sentences that")):
        text = tmp_path / f"text{count}"
        documents = [
            [f"{'a ' * count}{mark}", f"{'a ' * 13}{mark}"] for mark in ".!?:;"
        ]
        write_documents(text, documents)
        line = ["corpus", "--input", str(text), "--outputdir", str(tmp_path / "out")]
        line += ["--vocab-file", str(vocab), "--max-seq-length", "128"]
        monkeypatch.setattr("sys.argv", line)
        run_stage("corpus")
        assert told in (said := capsys.readouterr().err)
        assert ("no sequence holds" in said) is bool(told)


def test_how_well_a_vocabulary_fits_is_printed_before_anything_is_prepared(
    tmp_path, monkeypatch, capsys
):
    """The printed figures are those of the tokenizer of the preparation."""
    documents = [
        [sentence.replace("e", "\u0436") for sentence in document]
        for document in made_up_documents(40)
    ]
    write_documents(tmp_path / "text", documents)
    line = [
        "corpus",
        "--input",
        str(tmp_path / "text"),
        "--outputdir",
        str(tmp_path / "out"),
        "--vocab-size",
        "300",
    ]
    monkeypatch.setattr("sys.argv", line)
    run_stage("corpus")
    download = tmp_path / "out" / "download"
    words, text = (
        vocabulary.load(download / "vocab.txt"),
        (download / "results4" / "eval.txt").read_bytes(),
    )
    tokens = [words.tokens[token] for token in tokenize(text, words).tokens]
    each = len(tokens) / sum(not token.startswith("##") for token in tokens)
    assert (
        f"vocabulary: {each:.2f} tokens per word, 0.00% of the tokens un"
        in capsys.readouterr().err
    )
    characters_of_text = sorted(
        set(text.decode().lower().replace(" ", "").replace("\n", ""))
    )
    letters = "".join(f"{letter}\n##{letter}\n" for letter in characters_of_text)
    given = tmp_path / "latin"
    given.write_text(
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n" + letters.replace("\u0436", "e"),
        encoding="utf-8",
    )
    monkeypatch.setattr("sys.argv", [*line[:-2], "--vocab-file", str(given)])
    run_stage("corpus")
    unknown = [tokenize(text, vocabulary.load(given)).tokens == 1]
    assert f"{np.mean(unknown):.2%} of the tokens unknown" in capsys.readouterr().err
    assert (download / "vocab.txt").read_bytes() == given.read_bytes()
