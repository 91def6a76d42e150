"""Habana's DeepSpeed BERT-1.5B: its data of 128 tokens, its model's and DeepSpeed's JSON and its
hostfile, by the `deepspeed` launcher, from the first step to a resumed run and weights to take along.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ..waiting import free_ports, processes_with, wait_until
from .conftest import Shell
from .foreign import WORDS, instances, padded_shard

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(900)]

LENGTH, MASKS = 128, 20
# scripts/bert_1.5b_config.json, narrow: Pre-LN, "gelu" as erf.
MODEL = {
    "hidden_size": 24, "hidden_act": "gelu", "initializer_range": 0.02, "vocab_size": len(WORDS),
    "hidden_dropout_prob": 0.1, "num_attention_heads": 3, "type_vocab_size": 2, "max_position_embeddings": LENGTH,
    "num_hidden_layers": 2, "intermediate_size": 40, "attention_probs_dropout_prob": 0.1,
    "layer_norm_large_model": True,
}  # fmt: skip
DATA = "hdf5_lower_case_1_seq_len_128_max_pred_20_masked_lm_prob_0.15_random_seed_12345_dupe_factor_5/books_wiki_en_corpus"


def deepspeed_json(batch: int, micro: int, steps_per_print: int, **zero: Any) -> dict[str, Any]:  # fmt: skip
    """In the layout of scripts/deepspeed_config_bert_*.json."""
    return {
        "steps_per_print": steps_per_print,
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "tensorboard": {"enabled": False, "output_path": "./results/tensorboard"},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": True, "synchronized": False}},
    }


# Their two files: of 8 and of 32 devices.
OF_1_5B = deepspeed_json(12_288, 32, 48, stage=1, contiguous_gradients=False)
OF_5B = deepspeed_json(
    12_288, 32, 4, stage=2, overlap_comm=False, reduce_scatter=False, contiguous_gradients=False,
    reduce_bucket_size=150_000_000,
)  # fmt: skip


def shard(path: Path, count: int, seed: int, copies: int = 1) -> None:
    padded_shard(path, instances(count, seed), LENGTH, MASKS, copies)


@pytest.fixture
def site(shell: Shell) -> Shell:
    """Their folder: data, JSONs, hostfile."""
    data = shell.folder / DATA
    for part in range(4):
        shard(data / f"books_wiki_en_corpus_training_{part}.hdf5", 48, part)
    (shell.folder / "bert_config.json").write_text(json.dumps(MODEL))
    small = deepspeed_json(24, 6, 48, stage=1, contiguous_gradients=False)
    (shell.folder / "ds.json").write_text(json.dumps(small))
    (shell.folder / "hostsfile").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    # DeepSpeed's own Python; LOCAL_SIZE: the devices of a machine without any.
    shell.env |= {"PYTHON": sys.executable, "LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    shell.env["PATH"] = f"{Path(sys.executable).parent}:{shell.env['PATH']}"
    return shell


def settings(site: Shell, run: str, **more: str) -> str:
    """run_bert_1.5b_8x.sh's settings, in our names, on a model and steps that take seconds."""
    small = {
        "BERT_CONFIG": f"{site.folder}/bert_config.json", "BATCHSIZE": "6", "GRADIENT_STEPS": "2", "LR": "0.02",
        "MAX_STEPS": "12", "CHECKPOINT_EVERY_STEPS": "4", "LOG_EVERY_STEPS": "1", "DEVICE": "cpu",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    theirs = {
        "DATADIR_PHASE2": f"{site.folder}/{DATA}", "CHECKPOINT_DIR": f"{site.folder}/{run}/checkpoints",
        "RUN_DIR": f"{site.folder}/{run}", "ENGINE": "deepspeed", "DEEPSPEED_CONFIG": f"{site.folder}/ds.json",
        "DEEPSPEED_CHECKPOINTS": "1",
    }  # fmt: skip
    exports = " ".join(f"{name}='{value}'" for name, value in (theirs | small | more).items())  # fmt: skip
    return f"source env.sh; source configs/config_DGXH100_1x8x32x48_1.5b.sh\nexport {exports}\n"  # fmt: skip


def one_node(site: Shell, run: str, **more: str) -> str:
    """Their command: no --local_rank, and a command instead of a script."""
    command = f"deepspeed --num_nodes 1 --num_gpus 2 --master_port {free_ports()} --no_local_rank --no_python"
    return site.type(f"{settings(site, run, **more)}{command} python -u -m bert").stderr


def losses(site: Shell, run: str) -> list[float]:
    lines = (site.folder / run / "metrics_0.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [entry["loss"] for entry in entries if entry["kind"] == "train"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What their users hand on: their zero_to_fp32.py's file."""
    script, made = folder / "zero_to_fp32.py", folder / "fp32"
    command = [sys.executable, script, folder, made]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    found: dict[str, torch.Tensor] = torch.load(made / "pytorch_model.bin", weights_only=True)  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("config", "theirs", "ranks"),
    [("config_DGXH100_1x8x32x48_1.5b", OF_1_5B, 8), ("config_DGXH100_4x8x32x12_5b", OF_5B, 32)],
)  # fmt: skip
def test_their_jsons_go_with_the_configs_of_their_models(
    site: Shell, config: str, theirs: dict[str, Any], ranks: int
) -> None:
    shard(site.folder / DATA / "books_wiki_en_corpus_training_4.hdf5", 64, 4, copies=192)  # fmt: skip
    on = {"activation_checkpointing": {"partition_activations": True}}
    for given in (theirs, theirs | on):
        (site.folder / "ds.json").write_text(json.dumps(given))
        said = site.type(
            f"source env.sh; source configs/{config}.sh\n"
            f"export DATADIR_PHASE2={site.folder}/{DATA} ENGINE=deepspeed DEEPSPEED_CONFIG={site.folder}/ds.json\n"
            f"export DEVICE=cpu WORLD_SIZE={ranks} CHECKPOINT_DIR={site.folder}/none\npython -m bert --check"
        ).stdout
        assert "global batch   12288 sequences = 32 rows" in said
        assert "5 files in" in said


def test_a_run_on_one_node_stops_resumes_and_hands_on_its_weights(site: Shell) -> None:
    """As with --steps_this_run and --resume_from_checkpoint."""
    one_node(site, "whole")
    whole = losses(site, "whole")
    assert len(whole) == 12
    assert min(whole[-3:]) < whole[0] - 0.3, "it learns"

    one_node(site, "run", STEPS_THIS_RUN="7")
    folder = site.folder / "run/checkpoints"
    assert (folder / "latest").read_text() == "global_step7"
    assert {path.name for path in folder.glob("global_step*")} == {"global_step4", "global_step7"}  # fmt: skip
    one_node(site, "run", RESUME="1")
    assert (folder / "latest").read_text() == "global_step12"
    assert losses(site, "run") == whole
    mine, undisturbed = weights(folder), weights(site.folder / "whole/checkpoints")
    assert all(torch.equal(undisturbed[name], mine[name]) for name in undisturbed)

    # Another run, of another length, begins with that folder.
    said = one_node(site, "next", INIT_CHECKPOINT=str(folder), MAX_STEPS="2", LR="1e-9")
    assert f"step      2/2  loss {losses(site, 'next')[-1]:.4f}" in said
    assert losses(site, "next")[0] < whole[0] - 0.3


def on_two_machines(site: Shell, sshd: Any, **more: str) -> str:
    """The line of run_bert_5b_32x_lans.sh; variables travel in .deepspeed_env."""
    if not shutil.which("pdsh"):
        pytest.skip("needs pdsh, by which the launcher reaches other machines")
    lines = settings(site, "run", GRADIENT_STEPS="2", **more)
    site.env |= {"PDSH_SSH_ARGS_APPEND": sshd.env["SSH_OPTIONS"]}
    # The launcher looks for the file where it is started, or at home.
    site.type(f"{lines}python -m bert deepspeed-config --environment >{site.folder}/.deepspeed_env")  # fmt: skip
    command = f"deepspeed --hostfile={site.folder}/hostsfile --master_addr 127.0.0.1 --master_port {free_ports()}"
    return f"cd {site.folder}; exec {command} --no_ssh_check --no_local_rank --no_python {sys.executable} -u -m bert"


def test_a_hostfile_of_two_machines_trains_on_both(site: Shell, sshd: Any) -> None:
    site.type(on_two_machines(site, sshd))
    assert len(losses(site, "run")) == 12
    described = json.loads((site.folder / "run/config.json").read_text())
    assert described["dist"]["world_size"] == 2
    assert (site.folder / "run/checkpoints/latest").read_text() == "global_step12"


def test_a_rank_killed_on_another_machine_fails_the_launcher(site: Shell, sshd: Any) -> None:  # fmt: skip
    line = on_two_machines(site, sshd, MAX_STEPS="1000000", DIST_TIMEOUT="100")
    environ, figures = site.env, site.folder / "run/metrics_0.jsonl"
    process = subprocess.Popen(["bash", "-c", line], env=environ, start_new_session=True)  # fmt: skip
    try:
        wait_until(lambda: figures.exists() and figures.read_text(), 240)
        for number in processes_with(f"RUN_DIR={site.folder}/run"):
            folder = Path(f"/proc/{number}")
            trains = b"-m\0bert\0" in (folder / "cmdline").read_bytes()
            if trains and b"\0RANK=1\0" in (folder / "environ").read_bytes():
                os.kill(number, signal.SIGKILL)
        assert process.wait(timeout=240) != 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
