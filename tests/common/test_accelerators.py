"""One owner of what names mean: the trainer's MFU, certify's floors and the review's rates have the same models."""

import pytest

from common.accelerators import _names, bf16_tflops, family_of, model_of
from review.acceptance.floors import TABLE, floor_of
from review.rulebook.rules import table


@pytest.mark.parametrize(
    ("name", "model", "family", "tflops"),
    [
        ("NVIDIA GB200", "GB200", "GB200", 2500),
        ("NVIDIA B200", "B200", "B200", 2250),
        ("NVIDIA B300 SXM6 AC", "B300", "B300", 2250),
        ("NVIDIA H200 NVL", "H200 NVL", "H200", 835),
        ("NVIDIA GH200 480GB", "GH200", "H200", 989),
        ("NVIDIA GH200 144G HBM3e", "GH200", "H200", 989),
        ("NVIDIA H200", "H200", "H200", 989),
        ("NVIDIA H100 NVL", "H100 NVL", "H100", 835),
        ("NVIDIA H100 PCIe", "H100 PCIe", "H100", 756),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", "H100", 989),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", "A100", 312),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB", "A100", 312),
        ("NVIDIA A100-SXM-64GB", "A100 SXM", "A100", 312),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", "A100", 312),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB", "A100", 312),
        ("NVIDIA A30", "A30", "A30", 165),
        ("NVIDIA L40S", "L40S", "L40S", 362),
        ("NVIDIA L40", "L40", "L40", 181),
        ("NVIDIA A30X", "", "A30", 0),
        ("NVIDIA RTX A3000 Laptop GPU", "", "A30", 0),
        ("NVIDIA H200 MIG 1g.18gb", "", "H200", 0),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "", "A100", 0),
        ("TPU v4", "", "TPU-v4", 0),
        ("NVIDIA Tomorrow", "", "", 0),
        ("", "", "", 0),
    ],
)
def test_a_name_means_one_model_to_all(name, model, family, tflops):
    assert (model_of(name), family_of(name)) == (model, family)
    assert bf16_tflops(model) == tflops
    assert bool(floor_of(name)) == (tflops > 0 and model != "A100 SXM")


def test_tables_by_model_and_family_have_no_other_names():
    for part in ("gpus", "boards", "all_reduce"):
        assert all(bf16_tflops(x) or x == "GB300" for x in TABLE[part]), part
    assert all(family_of(name) == name for name in table("accelerators"))
    assert {*_names()["families"]} <= table("accelerators").keys()
