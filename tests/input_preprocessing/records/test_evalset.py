"""The evaluation samples of a file, whoever wrote it."""

import pytest

from bert.data.format import verify_records, write_records
from input_preprocessing.records.evalset import pick_samples
from input_preprocessing.tensorflow_files.tfrecord import Widths, write_tfrecord

from ...bert.data.samples import METADATA, assert_equal, make_records, write_nvidia
from ..conftest import alter_first_id, run


@pytest.mark.parametrize("kind", ["records", "tfrecord", "fixed", "variable"])
def test_the_evaluation_set_is_picked_as_the_benchmark_does(tmp_path, capsys, kind):
    records, source = make_records(25), tmp_path / "eval.tfrecord"
    if kind == "records":
        write_records(source, records, METADATA)
    elif kind == "tfrecord":
        write_tfrecord(source, records, Widths(64, 20))
    else:
        write_nvidia(source, records, kind)
    target = tmp_path / "part_eval_10k.hdf5"
    run("evalset", "--source", source, "--target", target, "--num-samples", 10)
    assert "10 evaluation samples" in capsys.readouterr().err
    picked, metadata = verify_records(target)
    assert_equal(picked, records.select([int(i * 2.5) for i in range(10)]))
    whose = METADATA.source[0][0] if kind == "records" else source.name
    assert metadata.source[0][0] == whose
    assert pick_samples(source, target) == 25, "all that there are"


@pytest.mark.parametrize(("kind", "target", "message"), [
    ("no records", "b.hdf5", "a.hdf5"),
    ("changed", "b.hdf5", r"a\.hdf5 was changed after it was written"),
    ("records", "b.tfrecord", "export_records"),
    ("records", "./a.hdf5", "is the source"),
])  # fmt: skip
def test_what_it_cannot_take_is_one_line(tmp_path, kind, target, message):
    source = tmp_path / "a.hdf5"
    write_records(source, make_records(20), METADATA)
    if kind == "no records":
        source.write_bytes(b"no records at all, of any kind")
    elif kind == "changed":
        alter_first_id(source)
    before = source.read_bytes()
    with pytest.raises(SystemExit, match=message) as ended:
        run("evalset", "--source", source, "--target", f"{tmp_path}/{target}")
    assert "\n" not in str(ended.value.code)
    assert [path.name for path in tmp_path.iterdir()] == ["a.hdf5"]
    assert source.read_bytes() == before
