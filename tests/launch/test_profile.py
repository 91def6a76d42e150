"""NVTX_FLAG=1 runs rank 0 under Nsight Systems, and no other."""

from __future__ import annotations

NSYS = """if [[ $2 == --help ]]; then echo "$NSYS_HELP"; exit; fi
while [[ $1 != */python ]]; do [[ $1 == --output=* ]] && touch "${1#--output=}.nsys-rep"; shift; done
exec "$@" """


def test_rank_0_is_profiled_with_a_report_beside_the_results(checkout):
    checkout.stand_in("nsys", NSYS)
    checkout.env["PYTHON"] = str(checkout.root.parent / "bin" / "python")
    done = checkout.run(
        "./run_local.sh",
        after="export NVTX_FLAG=1 DGXNGPU=4",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(rank["RANK"] for rank in checkout.ranks()) == ["0", "1", "2", "3"]
    commands = [call for call in checkout.calls("nsys") if "--help" not in call]
    assert len(commands) == 1
    assert all(call.endswith("'-u' '-m' 'bert'") and "--pytorch" not in call for call in commands)
    reports = sorted(path.name for path in checkout.run_dir.glob("profile_*"))
    assert reports == ["profile_0_rank0.nsys-rep"]


def test_pytorchs_ranges_are_requested_if_nsys_supports_them(checkout):
    checkout.stand_in("nsys", NSYS)
    checkout.env["PYTHON"] = str(checkout.root.parent / "bin" / "python")
    done = checkout.run("./run_local.sh", after="export NVTX_FLAG=1", NSYS_HELP="  --pytorch=none")
    assert done.returncode == 0, done.stderr
    assert sum("'--pytorch=autograd-nvtx'" in call for call in checkout.calls("nsys")) == 1


def test_two_profilers_at_once_are_refused(checkout):
    done = checkout.run("./run_local.sh", after="export NVTX_FLAG=1 PROFILE_STEPS=2,3 DGXNGPU=1")
    assert done.returncode != 0
    assert (
        done.stderr
        == "run: error: NVTX_FLAG=1 and PROFILE_STEPS: one profiler at a time; unset one\n"
    )
    assert not checkout.ranks()


def test_without_nsys_the_trial_says_what_is_missing(checkout):
    done = checkout.run("./run_local.sh", after="export NVTX_FLAG=1 DGXNGPU=1")
    assert done.returncode == 1
    assert "run: error: NVTX_FLAG=1, but nsys is not on PATH here" in done.stdout
    assert not checkout.ranks()
