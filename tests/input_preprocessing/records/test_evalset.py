"""The evaluation samples of a file, whoever wrote it."""

from __future__ import annotations

import pytest

from bert.data.format import verify_records

from ... import forked
from ...bert.data.samples import assert_equal, make_records, write_nvidia
from ..tensorflow_files.test_tfrecord import example, features_of, frame


@pytest.mark.parametrize("kind", ["tfrecord", "fixed", "variable"])
def test_samples_of_others_files_are_picked_as_the_reference_does(tmp_path, kind):
    records, source = make_records(25), tmp_path / "eval.tfrecord"
    if kind == "tfrecord":
        examples = (example(features_of(records, i)) for i in range(25))
        source.write_bytes(b"".join(map(frame, examples)))
    else:
        write_nvidia(source, records, kind)
    target = tmp_path / "part_eval_10k.hdf5"
    done = forked.run("input_preprocessing", "evalset", "--source", source, "--target", target, "--num-samples", 10)  # fmt: skip
    assert done.returncode == 0, done.stderr
    picked, metadata = verify_records(target)
    assert_equal(picked, records.select([int(i * 2.5) for i in range(10)]))
    assert metadata.source[0][0] == "eval.tfrecord"


@pytest.mark.parametrize(
    ("content", "target"), [(b"no records at all, of any kind", "a.hdf5"), (None, "a.tfrecord")]
)  # fmt: skip
def test_what_it_cannot_take_is_one_line(tmp_path, content, target):
    write_nvidia(tmp_path / "a", make_records(3), "fixed")
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    done = forked.run("input_preprocessing", "evalset", "--source", tmp_path / "a", "--target", tmp_path / target)  # fmt: skip
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / target).exists()
