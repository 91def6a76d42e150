"""KERNEL_CACHE without a container (with one: test_docker.py): no change by default, no failure."""

from __future__ import annotations

from .test_docker import caches_of

SCRIPT = "./run_local.sh"


def test_without_a_container_each_compiler_keeps_its_own_cache(checkout):
    assert checkout.run(SCRIPT).returncode == 0
    assert caches_of(checkout.ranks()[0]) == {}
    assert [path.name for path in checkout.logdir.iterdir()] == [checkout.run_dir.name]


def test_a_folder_that_cannot_be_created_is_refused(checkout):
    blocked = checkout.root.parent / "blocked"
    blocked.write_text("a file")
    done = checkout.run(SCRIPT, KERNEL_CACHE=str(blocked))
    assert done.returncode == 2
    assert (
        f"KERNEL_CACHE={blocked}: not a folder on every node: "
        in done.stderr.strip().splitlines()[-1]
    )
    assert not checkout.ranks()


def test_a_folder_that_a_rank_cannot_write_costs_time_but_not_the_run(checkout):
    script = checkout.root / "launch" / "run" / "preflight.sh"
    script.write_text(
        script.read_text() + "preflight::outputs() { :; }\n"
    )  # of a node whose folder went away
    done = checkout.run(SCRIPT, KERNEL_CACHE="/proc/no such folder")
    assert done.returncode == 0, done.stderr
    output = (checkout.run_dir / "output_0.txt").read_text()
    assert output.count("cannot be written: kernels are compiled in each trial") == 1
    assert caches_of(checkout.ranks()[0]) == {}
