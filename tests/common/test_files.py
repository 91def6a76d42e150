"""Why a file cannot be read or written."""

import pickle
from contextlib import suppress

import pytest
import torch

from common.files import NoSpaceError, damage, whole_file

from ..disks import small_disk


def test_pytorchs_advice_to_trust_a_file_is_not_given_for_a_damaged_one(tmp_path):
    (tmp_path / "step.pt").write_bytes(b"damaged")
    with pytest.raises(pickle.UnpicklingError, match="weights_only") as caught:
        torch.load(tmp_path / "step.pt", weights_only=True)
    assert damage(caught.value) == "not what torch.save writes, or cut off"
    assert (
        damage(RuntimeError("the archive ends too soon\nand more"))
        == "the archive ends too soon"
    )
    assert damage(EOFError()) == "EOFError"


def test_a_full_disk_is_named_whatever_error_a_library_raises_for_it(tmp_path):
    def write(num_bytes, known=0):
        with whole_file(tmp_path / "disk" / "a.pt", known) as partial:
            with suppress(OSError):
                partial.write_bytes(bytes(num_bytes))
            raise RuntimeError("basic_ios::clear: iostream error")

    with small_disk(tmp_path / "disk", 1 << 20):
        told = r"disk: a\.pt needs 2\.0 MB, \d\.\d MB are free"
        with pytest.raises(NoSpaceError, match=told):
            write(2 << 20, known=2_000_000)
        with pytest.raises(NoSpaceError, match=r"a\.pt is larger than \d\.\d MB"):
            write(2 << 20)
        with pytest.raises(RuntimeError, match="basic_ios"):
            write(1)
