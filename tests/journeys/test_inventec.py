"""Inventec's and NVIDIA's packed BERT: the folder that their prepare_data.sh left on disk trains as it
is, by their three lines: source env.sh, source a config, sbatch run.sub.
"""

from pathlib import Path

import pytest

from .conftest import Shell, exported
from .foreign import (  # fmt: skip
    instances,
    model_files,
    nvidia_checkpoint,
    packed_shard,
    variable_shard,
)

CONFIG = "configs/config_P8000H100_1x8x48x1_pack.sh"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The tree of their README: packed parts without a suffix, each beside its list of samples."""
    data = tmp_path / "data"
    (data / "packed_data").mkdir(parents=True)
    (data / "hdf5/eval_varlength").mkdir(parents=True)
    for part in range(4):
        made = iter(instances(96, seed=part))
        rows = [[next(made) for _ in range(1 + row % 3)] for row in range(48)]
        packed_shard(data / "packed_data" / f"part_{part:05d}", rows)
        (data / "packed_data" / f"shard_list_{part:05d}.lst").write_text("[[[9, 0]]]")
    variable_shard(data / "hdf5/eval_varlength/part_eval_10k.hdf5", instances(20, 9))
    model_files(data / "phase1")
    nvidia_checkpoint(data / "phase1/model.ckpt-28252.pt")
    return data


def site(data: Path) -> str:
    """Their env.sh."""
    return "\n".join([
        f'export DATADIR={data} DATADIR_PHASE2_PACKED="{data}/packed_data"',
        f'export EVALDIR="{data}/hdf5/eval_varlength" CHECKPOINTDIR_PHASE1="{data}/phase1"',
        "source env.sh", f"source {CONFIG}", exported(),
    ])  # fmt: skip


def test_their_folder_trains_as_it_is(shell: Shell, data: Path) -> None:
    said = shell.type(f"{site(data)}\npython -m bert --check").stdout
    assert "4 files in" in said
    assert "unknown vocabulary" in said, "which is not another one"
    done = shell.type(f"{site(data)}\nNEXP=2 ./run_local.sh")
    assert done.stderr.strip().endswith(f"all 2 trials reached the target: {shell.results}")  # fmt: skip
    log = shell.log(1)
    assert log["run_stop"] == "success"
    assert log["global_batch_size"] == 2 * 6 * 2
    assert log["eval_accuracy"] >= 0.3
    assert shell.review("show").count("success") == 2
    judged = shell.review("check")
    assert "compliance_checker passes" in judged
    assert "not the benchmark: hidden_size 24" in judged


def test_another_vocabulary_beside_them_is_refused_by_what_does_not_fit(
    shell: Shell, data: Path
) -> None:
    path = data / "phase1/bert_config.json"
    path.write_text(path.read_text().replace('"vocab_size": 211', '"vocab_size": 120'))
    lines = f"{site(data)}\nexport INIT_CHECKPOINT=\n"
    refused = [
        shell.type(f"{lines}{command}", status=2).stderr.strip().splitlines()[-1]
        for command in ("python -m bert --check", "python -m bert")
    ]
    assert refused[0] == refused[1]
    assert "token ids beyond vocab_size 120" in refused[0]


@pytest.mark.slurm
def test_run_sub_trains_on_their_folder(slurm_shell: Shell, data: Path) -> None:
    shell = slurm_shell
    line = '-N "$DGXNNODES" -t "$WALLTIME" run.sub'
    said = shell.submit(f"{site(data)}\nexport NEXP=1", line)
    assert said.strip().endswith(f"the trial reached the target: {shell.results}")
    assert shell.log()["run_stop"] == "success"
    assert shell.results.name.startswith("P8000H100_1x8x48x1_pack_")
