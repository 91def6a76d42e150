"""Why a file cannot be read."""

from __future__ import annotations

import pickle

import pytest
import torch

from common.files import damage


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
