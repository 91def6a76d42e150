"""KERNEL_CACHE without a container (with one: test_docker.py): no change by default, no failure."""

from __future__ import annotations

from .test_docker import caches_of


def test_without_a_container_each_compiler_keeps_its_own_cache(undisturbed):
    checkout, _ = undisturbed
    assert caches_of(checkout.ranks()[0]) == {}
    assert [path.name for path in checkout.logdir.iterdir()] == [checkout.run_dir.name]


def test_a_folder_that_a_rank_cannot_write_costs_time_but_not_the_run(checkout):
    # Of a node whose folder went away.
    checkout.edit("run/preflight.sh", "preflight::record()", "preflight::outputs() { :; }\npreflight::record()")  # fmt: skip
    checkout.run(KERNEL_CACHE="/proc/no such folder", status=0)
    output = (checkout.run_dir / "output_0.txt").read_text()
    assert output.count("cannot be written: kernels are compiled in each trial") == 1
    assert caches_of(checkout.ranks()[0]) == {}
