"""``sbatch prepare_data.sub`` on a real Slurm of two nodes: the same data set as on one machine, whatever stops it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ... import held
from ...waiting import free_ports, wait_until
from ..conftest import prepared_digests

pytestmark = pytest.mark.slurm

CLUSTER = Path(__file__).parents[2] / "launch" / "slurm_cluster.sh"
OPTIONS = [
    "--skip-download",
    "--packed-data",
    "--shards",
    "4",
    "--dupe-factor",
    "2",
    "--max-seq-length",
    "64",
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a running cluster of two nodes; skips if none can be started."""
    if os.geteuid() != 0:
        pytest.skip("a Slurm cluster needs root")
    folder = tmp_path_factory.mktemp("slurm")
    environment = {
        **os.environ,
        "SLURM_TEST_PORT": str(free_ports(3)),
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    up = subprocess.run(
        [CLUSTER, "up", folder, "2", "0"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if up.returncode and shutil.which("slurmctld") is None:
        pytest.skip(f"Slurm cannot be installed here: {up.stderr.strip()[-300:]}")
    assert up.returncode == 0, up.stderr
    yield environment
    subprocess.run([CLUSTER, "down", folder], check=True, env=environment)


Submit = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def submit(environment: dict[str, str], repository: Path, fresh: Path) -> Submit:
    """Submits a preparation of `fresh` on two nodes; what it returns ends as the job does."""

    def start(*more: str, **variables: str) -> subprocess.Popen[str]:
        script = repository / "input_preprocessing" / "prepare_data.sub"
        line = [
            "sbatch",
            "--wait",
            "-N2",
            f"--output={fresh.parent}/job.out",
            script,
            "--outputdir",
            fresh,
            *OPTIONS,
        ]
        return subprocess.Popen(
            [*map(str, line), "--jobs", "1", *more],
            cwd=repository,
            env=environment | variables,
            text=True,
        )

    return start


def output(fresh: Path) -> str:
    return (fresh.parent / "job.out").read_text()


def test_two_nodes_make_the_data_set_of_one(submit: Submit, fresh: Path, packed: Path) -> None:
    assert submit().wait() == 0, output(fresh)
    assert prepared_digests(fresh) == prepared_digests(packed)
    text = output(fresh)
    assert "instances on 2 nodes" in text
    assert "shards on 2 nodes" in text
    assert not (fresh / "work").exists()
    assert submit().wait() == 0, output(fresh)
    assert "nothing to do" in output(fresh)


def test_a_job_cancelled_half_way_goes_on_when_submitted_again(
    submit: Submit, fresh: Path, packed: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    part = "work/instances/part*"
    site = held.site(tmp_path / "site", str(fresh / part))
    job = submit(PYTHONPATH=str(site))
    wait_until(lambda: list(fresh.glob(part)))
    subprocess.run(
        ["scancel", "--user", "root", "--name", "bert-data"], check=True, env=environment
    )
    assert job.wait() != 0
    made = {path: path.stat().st_mtime_ns for path in fresh.glob(part)}
    assert made
    assert not (fresh / "prepared-packed.json").exists()
    assert submit().wait() == 0, output(fresh)
    assert prepared_digests(fresh) == prepared_digests(packed)


def test_a_part_that_fails_fails_the_job_with_its_reason(submit: Submit, fresh: Path) -> None:
    (fresh / "work").mkdir()
    (fresh / "work" / "instances").touch()  # where a folder should be
    assert submit().wait() == 1
    lines = output(fresh).splitlines()
    again = "submit the same command again to continue"
    assert lines[-1] == f"prepare_data.sub: error: instances failed, see above; {again}"
    assert any("work/instances: " in line for line in lines)
    assert "Traceback" not in output(fresh)


def test_a_wrong_option_ends_the_job_before_any_step(submit: Submit, fresh: Path) -> None:
    assert submit("--short-seq-prob", "2").wait() == 1
    assert "--short-seq-prob is 2" in output(fresh)
    assert (
        output(fresh).splitlines()[-1] == "prepare_data.sub: error: nothing was started, see above"
    )
    assert not (fresh / "work").exists()
    assert {path.name for path in fresh.iterdir()} <= {".lock", "download"}


def test_outside_slurm_it_says_what_to_run(repository: Path) -> None:
    script = repository / "input_preprocessing" / "prepare_data.sub"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
    }
    done = subprocess.run([script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "prepare_data.sh" in done.stderr
