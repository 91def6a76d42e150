"""Vocabularies other than the benchmark's: cased and large ones, from text to training records."""

from pathlib import Path

import numpy as np
import pytest

from bert.checkpoint import huggingface
from bert.data.batch import gather_batch, make_batch
from bert.data.format import multiset_digest
from bert.data.synthetic import synthetic_records
from input_preprocessing.instances import sampling
from input_preprocessing.instances.options import SamplingConfig, sampling_digest
from input_preprocessing.text import corpus, vocabulary
from input_preprocessing.text.tokenization import tokenize
from input_preprocessing.verify.verdict import failures, verify

from ...bert.data.samples import make_records
from ...refused import refused
from ..conftest import (
    all_records,
    made_up_documents,
    make,
    prepared_digests,
    run,
    write_documents,
)
from ..instances import oracle
from ..instances.test_instances import assert_same


def original_words(folder: Path) -> set[str]:
    """The tokens that the training records hold or ask for, but special ones."""
    words = vocabulary.load(folder / "phase1" / "vocab.txt")
    records = all_records(folder / "packed_data")
    ids = {*records.input_ids.tolist(), *records.masked_lm_ids.tolist()}
    return {words.tokens[i] for i in ids if not words.tokens[i].startswith("[")}


def test_a_cased_preparation_keeps_capitals_and_accents(tmp_path, capsys):
    documents = made_up_documents(24)
    accented = [[each.replace("a", "\u00e1") for each in d] for d in documents]
    write_documents(tmp_path / "text", accented)

    def made(name: str, lower_case: str) -> set[str]:
        line = ["--input", str(tmp_path / "text"), "--vocab-size", "500"]
        make(tmp_path / name, *line, "--do-lower-case", lower_case)
        words = tmp_path / name / "phase1" / "vocab.txt"
        assert huggingface.lower_case(words) is bool(int(lower_case))
        config = words.with_name("tokenizer_config.json")
        assert config.exists() is not bool(int(lower_case))
        return original_words(tmp_path / name)

    cased, uncased = made("cased", "0"), made("uncased", "1")
    assert "warning" not in capsys.readouterr().err
    assert any(word[0].isupper() for word in cased)
    assert any("\u00e1" in word for word in cased)
    assert all(word == word.lower() and "\u00e1" not in word for word in uncased)
    assert not failures(verify(tmp_path / "cased", jobs=1))
    assert made("cased", "0") == cased
    assert "nothing to do" in capsys.readouterr().err
    # The corpus stage makes an uncased vocabulary for the same folder, and all is made again.
    assert made("cased", "1") == uncased
    assert prepared_digests(tmp_path / "cased") == prepared_digests(
        tmp_path / "uncased"
    )


@pytest.mark.parametrize(("tokens", "lower_case", "warning"), [
    (["the", "[unused1]"], True, ""),
    (["the", "The"], False, ""),
    (["the", "The"], True, "tokens with capitals: is --do-lower-case 1 right"),
    (["the", "[Q]"], False, "no tokens with capitals: is --do-lower-case 0"),
])  # fmt: skip
def test_a_vocabulary_unlike_the_text_is_told(capsys, tokens, lower_case, warning):
    special = "[UNK]", "[CLS]", "[SEP]", "[MASK]"
    vocabulary.Vocabulary((*special, *tokens), "").check_case(lower_case)
    said = capsys.readouterr().err
    assert warning in said
    assert bool(said) is bool(warning)


def test_what_was_made_before_there_was_a_choice_of_case_is_known_again():
    before = sampling_digest(SamplingConfig())
    assert before == "98045428e840d4f859113b4a622352d3"
    assert sampling_digest(SamplingConfig(do_lower_case=False)) != before


FILLERS = 40_000


@pytest.mark.slow  # compiles every stage for int32
def test_a_vocabulary_above_32_768_goes_from_text_to_training_batches(tmp_path):
    """The instances are the plain restatement's; shards, evaluation set, audit and batches have the same ids."""
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
    given = {"max_seq_length": 64, "dupe_factor": 2}
    expected = oracle.make_instances(text.read_bytes(), words.ids, **given)
    assert_same(records, expected, words.ids)
    make(tmp_path / "data")
    rows = all_records(tmp_path / "data" / "packed_data")
    assert multiset_digest(rows) == multiset_digest(records)
    assert not failures(verify(tmp_path / "data", jobs=1))
    batch = make_batch(rows, np.arange(rows.num_sequences), 64)
    assert np.array_equal(batch.input_ids.numpy(), rows.input_ids)
    assert np.array_equal(batch.masked_labels.numpy(), rows.masked_lm_ids)
    chosen = [np.array([0, 2]), np.array([1])]
    order = np.array([1, 0, 2])
    mixed = gather_batch([make_records(3), rows], chosen, order, 64, len(words))
    assert int(mixed.input_ids.max()) <= len(words)
    assert mixed.num_sequences == 3


def test_made_up_records_of_a_large_vocabulary_have_its_ids():
    records = synthetic_records(50, 64, 120_000, True, 0)
    assert records.input_ids.min() >= 0
    assert records.input_ids.max() > 32_768
    assert records.masked_lm_ids.max() > 32_768


def test_half_a_million_tokens_are_distinguished_whole_and_in_pieces(monkeypatch):
    """As many as the largest multilingual BERTs have."""
    special = "[UNK]", "[CLS]", "[SEP]", "[MASK]"
    tokens = (*special, *map(str, range(500_000)), "##a", "##ab")
    text = tokenize(
        b"499999 7 131068\n\n262143ab 500000 5a\n", vocabulary.Vocabulary(tokens, "")
    )
    found = " ".join(tokens[i] for i in text.tokens)
    assert found == "499999 7 131068 262143 ##ab [UNK] 5 ##a"
    assert text.tokens.dtype == np.int32
    monkeypatch.setattr(vocabulary, "NODE_MASK", 7)
    with refused("tokens have 9 bytes; at most 6 are allowed"):
        _ = vocabulary.Vocabulary(("[UNK]", "abcd"), "").trie


def test_words_that_the_tokenizer_does_not_know_are_not_learnt(tmp_path):
    """The trainer would take hours for such a word, and fill the vocabulary with its pieces."""
    words = " ".join(" ".join(document) for document in made_up_documents(20))

    def learnt(text: str) -> str:
        (tmp_path / "text").write_text(text)
        corpus.train_vocabulary([tmp_path / "text"], 300, tmp_path / "vocab.txt")
        return (tmp_path / "vocab.txt").read_text()

    too_long = f"{'x' * 3_000_000} {'yz' * 101}-{'z' * 201}"
    assert learnt(f"{words} {too_long}") == learnt(f"{words} -")
    assert "xx" in learnt(f"{words} {'x' * 200} " * 9)


def test_the_share_of_sentences_that_no_sequence_holds_is_printed(tmp_path, capsys):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", *vocabulary.SPECIAL_TOKENS, *"a.!?:;"]))
    for count, told in ((124, ""), (125, "90.00% of the tokens are in sentences that")):
        text = tmp_path / f"text{count}"
        documents = [
            [f"{'a ' * count}{mark}", f"{'a ' * 13}{mark}"] for mark in ".!?:;"
        ]
        write_documents(text, documents)
        line = ["--input", text, "--outputdir", tmp_path / "out", "--vocab-file", vocab]
        run("corpus", *line, "--max-seq-length", 128)
        assert told in (said := capsys.readouterr().err)
        assert ("no sequence holds" in said) is bool(told)


def test_how_well_a_vocabulary_fits_is_printed(tmp_path, capsys):
    """The printed figures are those of the tokenizer of the preparation."""
    documents = made_up_documents(40)
    cyrillic = [[each.replace("e", "\u0436") for each in d] for d in documents]
    write_documents(tmp_path / "text", cyrillic)
    line = ["--input", tmp_path / "text", "--outputdir", tmp_path / "out"]
    run("corpus", *line, "--vocab-size", 300)
    download = tmp_path / "out" / "download"
    words = vocabulary.load(download / "vocab.txt")
    text = (download / "results4" / "eval.txt").read_bytes()
    tokens = [words.tokens[token] for token in tokenize(text, words).tokens]
    each = len(tokens) / sum(not token.startswith("##") for token in tokens)
    told = f"vocabulary: {each:.2f} tokens per word, 0.00% of the tokens un"
    assert told in capsys.readouterr().err
    letters = sorted({*"".join(text.decode().lower().split())} - {"\u0436"})
    pieces = [piece for letter in letters for piece in (letter, f"##{letter}")]
    given = tmp_path / "latin"
    given.write_text("\n".join(["[PAD]", *vocabulary.SPECIAL_TOKENS, *pieces]))
    run("corpus", *line, "--vocab-file", given)
    known = vocabulary.load(given)
    unknown = np.mean(tokenize(text, known).tokens == known.ids["[UNK]"])
    assert f"{unknown:.2%} of the tokens unknown" in capsys.readouterr().err
    assert (download / "vocab.txt").read_bytes() == given.read_bytes()
