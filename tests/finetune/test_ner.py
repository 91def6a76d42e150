"""Token classification: CoNLL's files, their entities and scores, and a model that learns them."""

import random

import numpy as np
import pytest

from finetune import conll, entities, saved
from finetune.tables import Layout
from finetune.train import run

from ..refused import refused
from . import runs
from .runs import command, evaluate, exported, figures_of, table_of, train

NONE = conll.IGNORED
IOB1 = "EU NNP I-ORG\nsat VB O\n\nthe D O\nlake N I-LOC\nred N B-LOC\n"
FILES = {
    "CoNLL-2003": "-DOCSTART- -X- O\n\n" + IOB1,
    "no blank line at the end, CR LF": IOB1.strip().replace("\n", "\r\n"),
    "blank lines": "\n\n" + IOB1.replace("\n\n", "\n\n \n\n") + "\n\n",
    "tabs": IOB1.replace(" ", "\t"),
    "WNUT: blank lines with a tab": IOB1.replace(" ", "\t").replace("\n\n", "\n\t\n"),
    "two columns, more spaces": IOB1.replace(" NNP", "").replace(" VB", "  ").replace(" D", "").replace(" N ", " "),
    "UTF-16": IOB1,
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_words_and_tags_are_read_as_programs_write_them(tmp_path, name):
    path = tmp_path / "train.txt"
    encoding = "utf-16" if "UTF" in name else "utf-8"
    path.write_text(FILES[name], newline="", encoding=encoding)
    table = conll.read(path, Layout())
    assert table.texts == [("EU", "sat"), ("the", "lake", "red")]
    assert [*table.labels] == [["I-ORG", "O"], ["O", "I-LOC", "B-LOC"]]
    assert table.names == ("B-LOC", "I-LOC", "I-ORG", "O")
    assert "2 sentences, 5 words, tags B-LOC, I-LOC" in table.summary
    assert conll.read_words(path, Layout(labels=("O",))).texts == table.texts


def test_words_with_spaces_are_words_and_a_file_to_predict_needs_no_tags(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("New York\tB-LOC\n#\tO\n")
    assert conll.read(path, Layout()).texts == [("New York", "#")]
    path.write_text("EU\n#\n\nsat\n")
    assert conll.read_words(path, Layout()).texts == [("EU", "#"), ("sat",)]


@pytest.mark.parametrize(("text", "message"), [
    ("EU B-ORG\nsat\n", "a.txt:2: 'sat': expected 2 columns"),
    ("EU B-ORG\n\nsat x O\n", "a.txt:3: 'sat x O': expected 2 columns"),
    ("EU\nsat\n", "a.txt:1: 'EU': expected 1 columns, in the last a tag: O, B-"),
    ("EU B-ORG\nsat O\nred LOC\n", "a.txt:3: 'red LOC'"),
    ("# sent_id = 1\nEU B-ORG\n", "a.txt:1: '# sent_id = 1'"),
    ("-DOCSTART- O\n\n", "a.txt: has no words"),
    ("\n \n", "a.txt: has no examples"),
    ("caf\xe9 O\n", "a.txt: line 1 is not UTF-8: set ENCODING"),
])  # fmt: skip
def test_what_is_no_file_of_sentences_is_one_line(tmp_path, text, message):
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    with refused(message):
        conll.read(tmp_path / "a.txt", Layout())


@pytest.mark.parametrize(("tags", "found"), [
    ("I-A I-A O I-A", "A01 A33"),  # IOB1
    ("I-A B-A I-B", "A00 A11 B22"),
    ("B-A I-A B-A O B-B", "A01 A22 B44"),  # IOB2
    ("B-A I-A E-A S-A S-B", "A02 A33 B44"),  # BIOES
    ("O E-A I-A E-A", "A11 A23"),
    ("B I O B", "_01 _33"),
    ("B-a-b I-a-b I-a", "a-b01 a22"),
    ("", ""),
])  # fmt: skip
def test_entities_are_found_in_every_scheme(tags, found):
    known = [f"{kind}{a}{b}" for kind, a, b in entities.entities(tags.split())]
    assert known == found.split()


def test_scores_are_those_of_seqeval():
    metrics = pytest.importorskip("seqeval.metrics")
    generator, none = random.Random(1), {"zero_division": 0}
    for number in range(200):
        marks, kinds = "BIES"[: generator.choice([2, 4])], "XYZ"[: 1 + number % 3]
        tags = ["O", *(f"{mark}-{kind}" for mark in marks for kind in kinds)]
        sizes = [generator.randrange(1, 9) for _ in range(generator.randrange(1, 6))]
        said, true = ([generator.choices(tags, k=n) for n in sizes] for _ in range(2))
        for at in generator.sample(range(len(sizes)), len(sizes) // 2):
            said[at] = list(true[at])
        found, rows = entities.scores(said, true)
        for name, value in found.items():
            own = {} if name == "accuracy" else none
            theirs = getattr(metrics, f"{name}_score")(true, said, **own)
            assert value == pytest.approx(theirs), (name, said, true)
        if not rows[1:]:
            continue
        report = metrics.classification_report(true, said, output_dict=True, **none)
        for kind, *cells in rows[1:]:
            theirs = report.pop(kind)
            assert cells.pop() == str(theirs.pop("support"))
            assert cells == [f"{value:.4f}" for value in theirs.values()]
        assert all(" avg" in kind for kind in report), "no kind is left out"


def test_labels_are_on_first_pieces_and_long_texts_lose_no_word(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("unhappy B\n\u200b I\ncats O\nabcdefghij I-NEW\n\nsat O\n")
    table = conll.read(path, Layout())
    samples = conll.encode(table, ("B", "I", "O"), tokenizer, 8)
    names = [[tokenizer.names[n] for n in ids.tolist()] for ids, _ in samples.sequences]
    assert names == [
        ["[CLS]", "un", "##happy", "[UNK]", "cats", "[SEP]"],
        ["[CLS]", *("##" * (n > 0) + x for n, x in enumerate("abcdef")), "[SEP]"],
        ["[CLS]", "sat", "[SEP]"],
    ]
    # A tag that is not among the names has the number behind theirs.
    assert [row.tolist() for row in samples.labels["labels"]] == [
        [NONE, 0, NONE, 1, 2, NONE], [NONE, 3, *[NONE] * 6], [NONE, 2, NONE],
    ]  # fmt: skip
    batch = samples.batch(np.array([2, 0]))
    assert batch.labels.tolist() == [NONE, 2, NONE, NONE, 0, NONE, 1, 2, NONE]


def made_up(generator, count):
    """Sentences in which an animal is an entity, and a colour with the word behind it."""
    phrases = {"cats": ["B-ANIMAL"], "dog": ["B-ANIMAL"], "red king": ["B-COL", "I-COL"],
               "blue river": ["B-COL", "I-COL"], "old": ["O"], "sat": ["O"]}  # fmt: skip
    lines = []
    for _ in range(count):
        for phrase in generator.choices([*phrases], k=5):
            pairs = zip(phrase.split(), phrases[phrase], strict=True)
            lines += [f"{word} X {tag}" for word, tag in pairs]
        lines.append("")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def learnt(squad_environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ner")
    sizes = {"train": 150, "valid": 30, "test": 5}
    for number, (name, count) in enumerate(sizes.items()):
        (folder / f"{name}.txt").write_text(made_up(random.Random(number), count))
    environment = {**squad_environment, "TASK": "ner", "DATA": str(folder)}
    del environment["MAX_SEQ_LENGTH"]
    return train(environment, folder / "run", EPOCHS="7"), environment


def test_tags_are_learnt_scored_and_evaluated_again(learnt, tmp_path):
    folder, environment = learnt
    names = "f1", "precision", "recall", "accuracy"
    assert [figures_of(folder)[name] for name in names] == [1, 1, 1, 1]
    lines = (folder / "predictions.conll").read_text().splitlines()
    rows = table_of(folder.parents[1] / "valid.txt", " X ")
    assert lines == ["\t".join([*row, *row[1:]]) for row in rows]
    assert (folder / "classes.tsv").read_text().startswith(
        "class\tprecision\trecall\tf1\texamples\nANIMAL\t1.0000\t1.0000\t1.0000\t"
    )  # fmt: skip
    found = {}
    for mode, name in (("eval", "valid"), ("prediction", "test")):
        again = evaluate(environment, tmp_path / mode, folder, mode)
        said = table_of(again / "predictions.conll")
        known = table_of(folder.parents[1] / f"{name}.txt", " ")
        assert [row[-1] for row in said] == [row[-1] for row in known]
        found[mode] = figures_of(again)
    assert found["eval"]["f1"] == 1
    assert "f1" not in found["prediction"]


def test_a_model_of_tags_does_not_classify_texts(learnt, tmp_path, capsys):
    own = {"INIT_CHECKPOINT": str(learnt[0]), "RUN_DIR": str(tmp_path)}
    assert run(learnt[1] | own | {"TASK": "table", "MODE": "eval"}) == 2
    assert "was fine-tuned for ner: TASK=ner" in capsys.readouterr().err
    assert command("predict", learnt[0], "--text", "the dog sat") == 2
    assert "MODE=prediction, or transformers' pipeline" in capsys.readouterr().err
    words = "--batches", "1", "--batch-sizes", "1"
    assert command("benchmark", learnt[0], *words) == 0


def test_a_tag_that_training_had_not_counts_as_wrong(learnt, tmp_path):
    (tmp_path / "dev.conll").write_text("red X B-COL\nking X I-COL\n\nsat X I-NEW\n")
    model, environment = learnt
    again = evaluate(environment, tmp_path, model, DATA=str(tmp_path))
    figures = figures_of(again)
    assert (figures["precision"], figures["recall"]) == (1, 0.5)


def encoded(mine, path, text):
    path.write_text(text)
    labels = mine.facts["labels"]
    return conll.encode(conll.read(path, Layout()), labels, mine.tokenizer, 48)


def test_scores_loss_and_entities_are_those_of_transformers(learnt, tmp_path):
    transformers = pytest.importorskip("transformers")
    kind = transformers.AutoModelForTokenClassification
    other = kind.from_pretrained(learnt[0]).eval()
    assert [*other.config.id2label.values()] == ["B-ANIMAL", "B-COL", "I-COL", "O"]
    mine = saved.load(learnt[0], "cpu")
    text = "the O\nunhappy O\ncats B-ANIMAL\n\nred B-COL\n"
    samples = encoded(mine, tmp_path / "a.txt", text)
    runs.assert_the_losses_of(other, mine, samples)
    words = transformers.AutoTokenizer.from_pretrained(learnt[0])
    how = {"tokenizer": words, "aggregation_strategy": "first"}
    tag = transformers.pipeline("token-classification", other, **how)
    found = [(one["entity_group"], one["word"]) for one in tag("sat dog sat red king")]
    assert found == [("ANIMAL", "dog"), ("COL", "red king")]


def test_the_onnx_recipe_of_a_page_serves_tags(
    learnt, repository, tmp_path, monkeypatch
):
    session = exported(learnt[0], repository, tmp_path, monkeypatch, "Token")
    mine = saved.load(learnt[0], "cpu")
    samples = encoded(mine, tmp_path / "a.txt", "sat O\nred B-COL\nking I-COL\n")
    ids = samples.sequences[0][0][None].astype(np.int64)
    given = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    (found,) = session.run(["logits"], given)
    np.testing.assert_allclose(found[0], mine.scores(samples, 1)[0], atol=1e-5)
