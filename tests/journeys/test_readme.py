"""This repository's README, read top to bottom: every command of it is typed, here or where it says.

What a tiny model on two CPU ranks needs is exported first, as the README says that exports win.
"""

import re
import sys
from pathlib import Path

import pytest

from .conftest import Shell, exported

# How a line of the README is typed here, by its beginning; None: with the reason, elsewhere.
REVIEW = f"{sys.executable} -m review"
TYPED: dict[str, str | None] = {
    "make demo": None,  # by .ci/run, in a fresh clone
    "make test": None,  # this
    "make setup": None,  # by .ci/run
    "docker build": None,  # tests/test_dockerfile.py; no docker here
    "input_preprocessing/prepare_data.sh --outputdir /data/bert": "PYTHON={real} input_preprocessing/prepare_data.sh --outputdir {home}/data "
    "--packed-data --input {home}/text.txt --vocab-size 400 --layers 1 --hidden-size 64 --max-seq-length 64 "
    "--max-predictions-per-seq 10 --dupe-factor 3 --shards 2 --num-eval-samples 20 --jobs 1",
    "./verify_dataset.sh": "PYTHON={real} ./verify_dataset.sh {home}/data --jobs 1",
    "export NEXP=10": "export NEXP=2",
    "source env.sh": "source env.sh",
    "make configs": "make -s configs VENV={venv}",
    "source configs/": "source configs/config_P8000H100_1x8x48x1_pack.sh",
    "./certify.sh": None,  # tests/launch/test_certify_nodes.py
    "sbatch -N 16 certify.sub": None,  # the same
    "launch/doctor.sh": "launch/doctor.sh data",
    "python -m bert --check": "python -m bert --check",
    "REHEARSAL=1 sbatch": None,  # tests/launch/test_rehearsal.py
    "sbatch -N": "./run_local.sh",  # run.sub: test_inventec.py
    "python -m review show results/": f"{REVIEW} show {{home}}/results",
    "python -m review check results/": f"{REVIEW} check {{home}}/results/*_*",
    "python -m review league results/": f"{REVIEW} league {{home}}/results --published",
}  # fmt: skip


def commands(readme: str) -> list[str]:
    """The lines of its shell blocks, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", readme, re.M | re.S)
    lines = (re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines())  # fmt: skip
    return [line for line in lines if line]


def test_every_command_of_the_readme_is_typed_in_order(shell: Shell, repository: Path) -> None:  # fmt: skip
    sentences = (f"The {a} {b} the {c} {d}." for a in ("old", "new", "red") for b in ("cat saw", "dog met", "man left")
                 for c in ("big", "small", "green", "blue") for d in ("house", "river", "stone", "tree"))  # fmt: skip
    text = "".join(f"{s}\n" + "\n" * (n % 6 == 5) for n, s in enumerate(sentences))
    (shell.folder / "text.txt").write_text(text * 4)
    places = {"home": shell.folder, "real": sys.executable, "venv": Path(sys.executable).parents[1]}  # fmt: skip
    script, unknown = [], []
    for line in commands((repository / "README.md").read_text()):
        begin = max((key for key in TYPED if line.startswith(key)), key=len, default="")
        if not begin:
            unknown.append(line)
        elif (typed := TYPED[begin]) is not None:
            script.append(typed.format(**places))
    assert not unknown, "of the README, and nobody types it"
    settings = exported(
        DATADIR=str(shell.folder / "data"), MAX_SEQ_LENGTH="64", NUM_EVAL_EXAMPLES="0", INIT_CHECKPOINT="''",
        TARGET_MLM_ACCURACY="0.01",
    )  # fmt: skip
    said = shell.type("\n".join([settings, *script])).stdout
    for expected in ("checks hold", "P8000H100_1x8x48x1_pack", "global batch   24 sequences", "success", "rank"):  # fmt: skip
        assert expected in said, expected
    assert shell.log(1)["run_stop"] == "success"


@pytest.mark.slurm
def test_data_are_prepared_by_a_slurm_job(slurm_shell: Shell) -> None:
    shell = slurm_shell
    texts = (f"The {n} cats saw a house.\nIt was {n} miles away." for n in range(99))
    (shell.folder / "text.txt").write_text("\n\n".join(texts))
    options = f"--outputdir {shell.folder}/data --packed-data --input {shell.folder}/text.txt --vocab-size 300"
    options += " --max-seq-length 64 --max-predictions-per-seq 10 --shards 2"
    said = shell.submit("", f"input_preprocessing/prepare_data.sub {options}")
    assert (shell.folder / "data/prepared-packed.json").is_file(), said
    shell.type(f"./verify_dataset.sh {shell.folder}/data")
    refused = shell.type("input_preprocessing/prepare_data.sub --outputdir x", status=2)
    assert len(refused.stderr.splitlines()) == 1
