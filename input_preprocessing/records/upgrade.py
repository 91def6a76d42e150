"""Stage `upgrade`: record files of an older version become files of this one."""

import argparse
from pathlib import Path

from bert.data import format as record_format
from bert.data.format import verify_records, version_of, write_records
from bert.data.hdf5 import open_hdf5
from bert.data.records import DataError
from input_preprocessing.stage.cli import say
from input_preprocessing.stage.parallel import run_tasks


def _is_older(path: Path) -> bool:
    """Raises DataError for a file that is newer than this program, or is unreadable."""
    attributes = open_hdf5(path).attributes
    if attributes.get("format") != record_format.FORMAT:
        return False  # of other makers, who have no versions
    return version_of(path, attributes) < record_format.VERSION


def _rewrite(path: Path) -> None:
    """Replaces a file as a whole: its contents and digests stay, which every list of them (index,
    prepared-*.json) goes by.
    """
    records, metadata = verify_records(path)
    written = write_records(path, records, metadata)
    if (written.content_digest, written.multiset_digest) != (
        metadata.content_digest,
        metadata.multiset_digest,
    ):
        raise DataError(f"{path} changed while it was rewritten; prepare it again")
    verify_records(path)[0].release()


def main(options: argparse.Namespace) -> None:
    """Rewrites in place every record file below a folder that an older version wrote, after its
    digests were checked.

    No reader needs it: all versions are read. May be stopped and run again.
    """
    paths = sorted(
        path for path in options.folder.rglob("*.hdf5") if not path.name.startswith(".")
    )
    if not paths:
        raise DataError(f"no .hdf5 files below {options.folder}; check the path")
    older = [path for path in paths if _is_older(path)]
    run_tasks("rewrite files", _rewrite, older, jobs=options.jobs)
    say(
        f"{options.folder}: {len(older)} of {len(paths)} files rewritten, "
        f"all are of format version {record_format.VERSION}"
    )
