"""Instances equal the reference's: on its own output, and on unusual texts compared with a plain re-implementation."""

import gzip
import itertools
import random
import resource
import subprocess
import sys

import numpy as np
import pytest

from bert.data import compiled
from bert.data.format import open_records, verify_records
from bert.data.records import Records
from input_preprocessing.instances import mersenne
from input_preprocessing.instances import sampling as instances
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.instances.sampling import make_instances
from input_preprocessing.text import vocabulary
from input_preprocessing.text.tokenization import tokenize
from input_preprocessing.text.vocabulary import Vocabulary

from ...refused import refused
from ..conftest import made_up_documents, run
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


PROSE = "".join("\n".join(d) + "\n\n" for d in made_up_documents(40)).encode()


def ours(data: bytes, words: Vocabulary, **options: float) -> Records:
    return make_instances(tokenize(data, words), words, SamplingConfig(**options))  # type: ignore[arg-type]


def assert_same(
    records: Records, expected: list[oracle.Instance], ids: dict[str, int]
) -> None:
    assert records.num_sequences == len(expected)
    for i, instance in enumerate(expected):
        tokens = records.input_ids[slice(*records.sequence_offsets[i : i + 2])]
        masked = slice(*records.masked_lm_offsets[i : i + 2])
        labels = records.masked_lm_ids[masked]
        assert tokens.tolist() == [ids[token] for token in instance.tokens]
        assert labels.tolist() == [ids[token] for token in instance.labels]
        assert records.masked_lm_positions[masked].tolist() == instance.positions
        assert records.segment_b_start[i] == instance.segment_b_start
        assert records.next_sentence_labels[i] == instance.random_next


def compare(data: bytes, words: Vocabulary, **options: float) -> Records:
    """Our instances, which have to be those of the plain restatement."""
    names = {"random_seed": "seed", "max_predictions_per_seq": "max_predictions"}
    given = {names.get(name, name): value for name, value in options.items()}
    expected = oracle.make_instances(data, words.ids, **given)  # type: ignore[arg-type]
    records = ours(data, words, **options)
    assert_same(records, expected, words.ids)
    return records


@pytest.mark.parametrize("case", ["en_a", "short_docs"])
def test_instances_are_the_references_own_bit_for_bit(shared, tmp_path, case):
    folder, target = shared / "golden", tmp_path / "out.hdf5"
    golden = np.load(folder / f"{case}.npz")
    words = vocabulary.load(folder / "vocab.txt")
    instances.write_instances(folder / f"{case}.txt", target, words, SamplingConfig())
    records, metadata = verify_records(target)
    for name in golden:
        assert np.array_equal(getattr(records, name), golden[name]), name
    assert metadata.vocab_md5 == "64800d5d8528ce344256daf115d4965e"


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_instances_of_odd_texts_equal_the_plain_restatement(words, name):
    compare(ODD_TEXTS[name], words)


@pytest.mark.parametrize("seed", range(25))
def test_instances_of_random_texts_equal_the_plain_restatement(words, seed):
    rng = random.Random(seed)
    odd = ["\n", "\n", "\n\n", "é", "Σ", "\u0301", "\u200b", "\x00", "\t", "CAT", "İ", "中", "\u2028", "-", "\xad"]  # fmt: skip
    bits = [*WORDS, *odd]
    drawn = (rng.choice(bits) + rng.choice(["", " ", " ", " "]) for _ in range(600))
    data = "".join(drawn).encode()
    options = {
        "max_seq_length": rng.choice([5, 6, 16, 64, 128]),
        "dupe_factor": rng.choice([1, 2, 3]),
        "random_seed": rng.randrange(1 << 40),
        "masked_lm_prob": rng.choice([0.0, 0.15, 0.5, 1.0]),
        "short_seq_prob": rng.choice([0.0, 0.1, 1.0]),
        "max_predictions_per_seq": rng.choice([1, 5, 76]),
    }
    assert compare(data, words, **options).num_sequences > 3


@pytest.mark.parametrize(("length", "predictions"), [(128, 20), (512, 76), (512, 80)])
def test_prose_equals_the_restatement_in_both_phases(words, length, predictions):
    options = {"max_seq_length": length, "max_predictions_per_seq": predictions}
    records = compare(PROSE, words, dupe_factor=2, **options)
    assert records.sequence_lengths.max() == length
    most = min(predictions, round(0.15 * length))
    assert np.diff(records.masked_lm_offsets).max() == most


@pytest.mark.parametrize("length", [16, 512])
def test_without_pairs_full_sequences_hold_each_document_once_a_copy(words, length):
    text = tokenize(PROSE, words)
    records = ours(PROSE, words, max_seq_length=length, dupe_factor=2, nsp=False)
    counts = np.diff(records.masked_lm_offsets)
    begins = np.repeat(records.sequence_offsets[:-1], counts)
    records.input_ids[begins + records.masked_lm_positions] = records.masked_lm_ids
    cls, sep = words.ids["[CLS]"], words.ids["[SEP]"]
    rows = np.split(records.input_ids, records.sequence_offsets[1:-1])
    expected = []
    for begin, end in itertools.pairwise(text.segment_offsets[text.document_offsets]):
        for i in range(begin, end, length - 2):
            piece = text.tokens[i : min(i + length - 2, end)]
            expected += 2 * [[cls, *piece.tolist(), sep]]
    assert sorted(row.tolist() for row in rows) == sorted(expected)
    assert np.array_equal(records.segment_b_start, records.sequence_lengths)
    wanted = np.round(0.15 * records.sequence_lengths).clip(1, 76)
    assert np.array_equal(counts, wanted)


def test_repeated_and_padded_vocabulary_lines_keep_their_first_id(tmp_path):
    data = b"[PAD]\r\n[UNK]\n  [CLS] \n[SEP]\n[UNK]\n\n[MASK]\nthe"
    path = tmp_path / "vocab.txt"
    path.write_bytes(data)
    words = vocabulary.load(path)
    assert words.ids == oracle.read_vocabulary(data)
    assert words.tokens == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "", "[MASK]", "the")


@pytest.mark.parametrize("seed", [0, 12345, -7, 1 << 70])
def test_random_numbers_are_cpythons(seed):
    state, rng = mersenne.initial_state(seed), random.Random(seed)
    for _ in range(700):
        assert mersenne.next_float(state) == rng.random()
        limit = rng.randint(1, 70000)
        assert mersenne.next_below(state, 70000) + 1 == limit
        assert mersenne.next_below(state, limit) == rng.randrange(limit)
    for size in (0, 1, 2, 3, 64, 1000):
        values, expected = np.arange(size), list(range(size))
        mersenne.shuffle(state, values)
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


def test_the_command_refuses_bad_input_in_one_line(tmp_path):
    names = "vocab.txt", "text", "bad.txt", "new.hdf5", "text.gz"
    vocab, text, bad, new, packed = (tmp_path / name for name in names)
    vocab.write_text("\n".join(WORDS), encoding="utf-8")
    text.write_bytes(b"the cat\n\nab\n")
    bad.write_text("cat\n")
    packed.write_bytes(gzip.compress(text.read_bytes()))
    given = "--input-file", text, "--vocab-file", vocab, "--output-file", new
    for option, value, message in (
        ("--input-file", tmp_path / "none", "cannot read the text"),
        ("--input-file", packed, "is not text but gzip"),
        ("--output-file", text, "is the source"),
        ("--vocab-file", bad, "not a BERT vocabulary"),
        ("--output-file", tmp_path / "no" / "out.hdf5", "cannot write"),
        ("--dupe-factor", 0, "--dupe-factor is 0"),
    ):
        with pytest.raises(SystemExit, match=message) as caught:
            run("instances", *given, option, value)
        assert "\n" not in str(caught.value.code)
    assert not list(tmp_path.glob("*new.hdf5*"))
    assert text.read_bytes() == b"the cat\n\nab\n"


def test_the_first_run_compiles_once_and_says_so(words, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(instances, "make_instances", lambda *given: made.append(given))
    for kept in (False, True):
        monkeypatch.setattr(compiled, "is_cached", lambda function, kept=kept: kept)
        instances.compile_first(words, SamplingConfig())
    assert capsys.readouterr().err.count("compiling") == 1
    assert len(made) == 1


@pytest.mark.slow
def test_a_line_of_100_mb_takes_less_than_3_gb(tmp_path):
    words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\nsat\n"
    (tmp_path / "vocab.txt").write_text(words)
    with open(tmp_path / "text", "w") as file:
        for _ in range(100):
            file.write("the cat sat café " * 58_824)
        file.write("\n\nthe cat\nsat\n")
    line = [sys.executable, "-m", "input_preprocessing", "instances"]
    line += ["--input-file", tmp_path / "text", "--vocab-file", tmp_path / "vocab.txt"]
    line += ["--output-file", tmp_path / "out.hdf5", "--dupe-factor", "2"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    subprocess.run(list(map(str, line)), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after < max(3_000_000, before + 1)
    records, _ = open_records(tmp_path / "out.hdf5")
    assert records.sequence_lengths.max() == 512
