"""Outputs that are cut, mutated, reordered or of another locale never pass without what they should hold."""

from certify import hardware

from .fuzz import BAD, GOOD, passes, wrong_machines, wrong_passes


def test_the_originals_are_what_they_should_be():
    assert all(passes(name, text) for name, text in GOOD.items())
    assert not any(passes(name, text) for name, text in BAD.items())


def test_no_mutant_of_a_tools_output_passes_wrongly():
    assert wrong_passes(600, seed=0) == []


def test_no_answer_of_nvml_sysfs_or_the_kernel_log_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "_dmesg", hardware._dmesg)  # fuzz replaces it
    assert wrong_machines(200, 0, tmp_path) == []
