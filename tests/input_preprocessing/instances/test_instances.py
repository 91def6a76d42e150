"""Instances equal the reference's: on its own output, and on unusual texts compared with a plain
re-implementation.
"""

from __future__ import annotations

import gzip
import itertools
import random
import sys

import numpy as np
import pytest

from bert.data import compiled
from bert.data.format import open_records, verify_records
from bert.data.records import Records
from input_preprocessing.instances import sampling as instances
from input_preprocessing.instances.mersenne import (
    initial_state,
    next_below,
    next_float,
    shuffle,
)
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.instances.sampling import make_instances
from input_preprocessing.stage.cli import run_stage
from input_preprocessing.text import vocabulary
from input_preprocessing.text.tokenization import tokenize
from input_preprocessing.text.vocabulary import Vocabulary

from ...refused import refused
from ..conftest import made_up_documents
from . import oracle

WORDS = """
[PAD] [UNK] [CLS] [SEP] [MASK] a b c ab abc ##a ##b ##c ##ab the cat sat ##s on mat . , ! ? - ' [ ] # $ é ß
##ß x ##x y ##y 中 文 ı i ##i ς σ ##ς ##σ ohm ##m o ##o 1 2 ##1 ##2 ## sep cls mask – “ ” ا ##ل क ##ा k
""".split()  # noqa: SIM905

ODD_TEXTS = {
    "carriage returns": b"the cat\r\nsat on\rthe mat\r\n\r\nab abc\r\n\r\na\r\n",
    "nul": b"the\x00cat sat\n\x00\nabc\n\na b\x00\n",
    "control characters and blank lines": b"a\x0bb\n\x0c\nc\n \t \nab\n\x1c\nthe\n\x7f\nmat\n\xc2\x85\nabc\n",
    "invalid bytes": b"the c\xffat\n\xc3\n\xe2\x82\nsat \xf0\x9f on\xed\xa0\x80\n\n\xff\xfe\n\nab\n",
    "broken by a carriage return": b"caf\xc3\r\xa9 the\n\nabc",
    "blank lines only": b"\n\n  \n\r\n",
    "empty": b"",
    "one document": b"the cat sat.\non the mat!\nabc ab a, b\nx y",
    "one word": b"cat",
    "special tokens spelt out": b"[SEP] the [CLS] cat [MASK]\n[sep]\n\n[UNK] [PAD] ##s",
    "long words": b"a" * 199 + b" " + b"a" * 200 + b" " + b"a" * 201 + b"\n" + "é".encode() * 200 + b"\n\nabc",
    "unicode spaces": "the\u00a0cat\u2003sat\u2028on\u2029the\u3000mat\u200bab\n\u2028\nabc\n\u200b\nx\n".encode(),
    "accents and cases": "É e\u0301 ẞ İ ΣΑΣ ΣΑΣ, Σ ΑΣ. K\u212a Ω\u2126 ﬁ Ǆ\n\u0301\n\nñ\u0303".encode(),
    "ideographs": "中文a中b \U0002a6d0 \uf900 ひらがな 한국어\n文\n".encode(),
    "other scripts": "कि का ال لا שלום ๏ ไทย ԱԲ\n\n“a–b” «c» ¿a? §1 ¶ € ™ ½ ① \U0001f600 \ue000 \u0378\n".encode(),
    "combining class order": "a\u0327\u0301 a\u302f\u302e\u0301b \u1b44\u1bab\u0315x\n\nab".encode(),
    "no newline at the end": b"the cat\n\nab",
}  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return vocabulary.load(path)


def ours(data: bytes, words: Vocabulary, **options: float) -> Records:
    return make_instances(tokenize(data, words), words, SamplingConfig(**options))  # type: ignore[arg-type]


def theirs(data: bytes, words: Vocabulary, **options: float) -> list[oracle.Instance]:
    names = {"random_seed": "seed", "max_predictions_per_seq": "max_predictions"}
    given = {names.get(name, name): value for name, value in options.items()}
    return oracle.make_instances(data, words.ids, **given)  # type: ignore[arg-type]


def prose() -> bytes:
    documents = made_up_documents(40)
    return "".join("\n".join(document) + "\n\n" for document in documents).encode()


def assert_same(
    records: Records, expected: list[oracle.Instance], ids: dict[str, int]
) -> None:
    assert records.num_sequences == len(expected)
    for i, instance in enumerate(expected):
        start, end = records.sequence_offsets[i : i + 2]
        first, last = records.masked_lm_offsets[i : i + 2]
        assert records.input_ids[start:end].tolist() == [
            ids[token] for token in instance.tokens
        ]
        assert records.masked_lm_positions[first:last].tolist() == instance.positions
        assert records.masked_lm_ids[first:last].tolist() == [
            ids[token] for token in instance.labels
        ]
        assert records.segment_b_start[i] == instance.segment_b_start
        assert records.next_sentence_labels[i] == instance.random_next


@pytest.mark.parametrize("case", ["en_a", "short_docs"])
def test_instances_are_the_references_own_bit_for_bit(shared, tmp_path, case):
    golden = np.load(shared / "golden" / f"{case}.npz")
    target = tmp_path / "out.hdf5"
    words = vocabulary.load(shared / "golden" / "vocab.txt")
    instances.write_instances(
        shared / "golden" / f"{case}.txt", target, words, SamplingConfig()
    )
    records, metadata = verify_records(target)
    for name in golden:
        assert np.array_equal(getattr(records, name), golden[name]), name
    assert metadata.vocab_md5 == "64800d5d8528ce344256daf115d4965e"


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_instances_of_odd_texts_equal_the_plain_restatement(words, name):
    data = ODD_TEXTS[name]
    assert_same(ours(data, words), oracle.make_instances(data, words.ids), words.ids)


@pytest.mark.parametrize("seed", range(25))
def test_instances_of_random_texts_equal_the_plain_restatement(words, seed):
    rng = random.Random(seed)
    odd = ["\n", "\n", "\n\n", "é", "Σ", "\u0301", "\u200b", "\x00", "\t", "CAT", "İ", "中", "\u2028", "-", "\xad"]  # fmt: skip
    bits = [*WORDS, *odd]
    data = "".join(
        rng.choice(bits) + rng.choice(["", " ", " ", " "]) for _ in range(600)
    ).encode()
    options = {
        "max_seq_length": rng.choice([5, 6, 16, 64, 128]),
        "dupe_factor": rng.choice([1, 2, 3]),
        "random_seed": rng.randrange(1 << 40),
        "masked_lm_prob": rng.choice([0.0, 0.15, 0.5, 1.0]),
        "short_seq_prob": rng.choice([0.0, 0.1, 1.0]),
        "max_predictions_per_seq": rng.choice([1, 5, 76]),
    }
    expected, records = theirs(data, words, **options), ours(data, words, **options)
    assert len(expected) > 3
    assert_same(records, expected, words.ids)


@pytest.mark.parametrize(("length", "predictions"), [(128, 20), (512, 76), (512, 80)])
def test_instances_of_prose_equal_the_plain_restatement_in_both_phases(
    words, length, predictions
):
    options = {"max_seq_length": length, "max_predictions_per_seq": predictions}
    expected = theirs(prose(), words, dupe_factor=2, **options)
    records = ours(prose(), words, dupe_factor=2, **options)
    assert_same(records, expected, words.ids)
    assert records.sequence_lengths.max() == length
    assert np.diff(records.masked_lm_offsets).max() == min(
        predictions, round(0.15 * length)
    )


@pytest.mark.parametrize("length", [16, 512])
def test_without_pairs_full_sequences_hold_each_document_once_a_copy(words, length):
    text = tokenize(prose(), words)
    records = ours(prose(), words, max_seq_length=length, dupe_factor=2, nsp=False)
    counts = np.diff(records.masked_lm_offsets)
    begins = np.repeat(records.sequence_offsets[:-1], counts)
    records.input_ids[begins + records.masked_lm_positions] = records.masked_lm_ids
    cls, sep = words.ids["[CLS]"], words.ids["[SEP]"]
    found = sorted(
        row.tolist()
        for row in np.split(records.input_ids, records.sequence_offsets[1:-1])
    )
    expected = []
    for begin, end in itertools.pairwise(text.segment_offsets[text.document_offsets]):
        runs = [
            text.tokens[i : min(i + length - 2, end)]
            for i in range(begin, end, length - 2)
        ]
        expected += 2 * [[cls, *run.tolist(), sep] for run in runs]
    assert found == sorted(expected)
    assert np.array_equal(records.segment_b_start, records.sequence_lengths)
    assert np.array_equal(
        counts, np.maximum(1, np.round(0.15 * records.sequence_lengths)).clip(max=76)
    )


def test_repeated_and_padded_vocabulary_lines_keep_their_first_id(tmp_path):
    data = b"[PAD]\r\n[UNK]\n  [CLS] \n[SEP]\n[UNK]\n\n[MASK]\nthe"
    path = tmp_path / "vocab.txt"
    path.write_bytes(data)
    words = vocabulary.load(path)
    assert words.ids == oracle.read_vocabulary(data)
    assert words.tokens == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "", "[MASK]", "the")


@pytest.mark.parametrize("seed", [0, 12345, -7, 1 << 70])
def test_random_numbers_are_cpythons(seed):
    state, rng = initial_state(seed), random.Random(seed)
    for _ in range(700):
        assert next_float(state) == rng.random()
        limit = rng.randint(1, 70000)
        assert next_below(state, 70000) + 1 == limit
        assert next_below(state, limit) == rng.randrange(limit)
    for size in (0, 1, 2, 3, 64, 1000):
        values, expected = np.arange(size), list(range(size))
        shuffle(state, values)
        rng.shuffle(expected)
        assert values.tolist() == expected


def test_a_huge_line_is_one_segment(words):
    records = ours(b"cat " * 300_000 + b"\n\nab\n", words, dupe_factor=1)
    assert records.num_sequences == 2
    assert sorted(records.sequence_lengths.tolist()) == [512, 512]


@pytest.mark.parametrize(("option", "value"), [
    ("max_seq_length", 4),
    ("max_predictions_per_seq", 0),
    ("masked_lm_prob", 1.5),
    ("dupe_factor", 0),
])  # fmt: skip
def test_an_option_out_of_range_is_refused(option, value):
    with refused(option.replace("_", "-")):
        SamplingConfig(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-(2**63), -(2**63) - 1, 2**63, 18446744073709551627])
def test_a_seed_of_any_size_is_recorded(words, tmp_path, seed):
    (tmp_path / "text").write_text("the cat\nsat the\n\ncat sat\n")
    config = SamplingConfig(random_seed=seed)
    instances.write_instances(tmp_path / "text", tmp_path / "out.hdf5", words, config)
    assert open_records(tmp_path / "out.hdf5")[1].random_seed == seed


def test_the_command_refuses_bad_input_in_one_line(tmp_path, monkeypatch):
    vocab, text, bad = tmp_path / "vocab.txt", tmp_path / "text", tmp_path / "bad.txt"
    vocab.write_text("\n".join(WORDS), encoding="utf-8")
    text.write_bytes(b"the cat\n\nab\n")
    bad.write_text("cat\n")
    new = tmp_path / "new.hdf5"
    packed = tmp_path / "text.gz"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    for option, value, message in (
        ("--input-file", tmp_path / "none", "cannot read the text"),
        ("--input-file", packed, "is not text but gzip"),
        ("--output-file", text, "is the source"),
        ("--vocab-file", bad, "not a BERT vocabulary"),
        ("--output-file", tmp_path / "no" / "out.hdf5", "cannot write"),
        ("--dupe-factor", 0, "--dupe-factor is 0"),
    ):
        line = {"--input-file": text, "--vocab-file": vocab, "--output-file": new}
        given = [
            str(item) for pair in (line | {option: value}).items() for item in pair
        ]
        monkeypatch.setattr(sys, "argv", ["instances", *given])
        with pytest.raises(SystemExit, match=message) as caught:
            run_stage("instances")
        assert "\n" not in str(caught.value.code)
    assert not list(tmp_path.glob("*new.hdf5*"))
    assert text.read_bytes() == b"the cat\n\nab\n"


def test_the_first_run_says_that_it_compiles_and_compiles_once(
    words, monkeypatch, capsys
):
    made = []
    monkeypatch.setattr(
        instances, "make_instances", lambda *arguments: made.append(arguments)
    )
    for kept in (False, True):
        monkeypatch.setattr(compiled, "is_cached", lambda function, kept=kept: kept)
        instances.compile_first(words, SamplingConfig())
    assert capsys.readouterr().err.count("compiling") == 1
    assert len(made) == 1
