"""The README files of a package: what was run, where a reviewer finds what, and how to run it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from review.results.score import USUAL, Result, Terms, load_results
from review.rulebook.description import listed
from review.submission.code import Code

_OWN = ("run.sub", "implementations/bert/training/loop.py")
_SYSTEM = """\
# {system}: MLPerf Training BERT of {organization}

| | |
|---|---|
{facts}

The code beside this file is commit `{commit}`. `{system}_*.json` beside it has every setting and version of the runs.

{run_again}

## The config

```bash
{config_text}
```

Logged hyper-parameters:

| | |
|---|---|
{hyperparameters}
{where}"""

_RUN_AGAIN = """\
## Run it again

```bash
./setup.sh                                                # once: the Python environment, or `./setup.sh docker`
./init_datasets.sh --outputdir /data/bert                 # once: text, checkpoint, records
./verify_dataset.sh /data/bert                            # checksums of all that trains and evaluates
source env.sh                                             # this site's paths; edit it first
source {config}
export NEXP=10
sbatch -N "$DGXNNODES" -t "$WALLTIME" run.sub             # with Slurm, or ./run_local.sh without
```

Each trial writes one `result_N.txt`. `run_and_time.sh` is one rank of one trial."""

_RUN_OTHER = """\
## Run it again

`README.md` beside this file says how. The scripts that the rules ask for: `setup.sh` installs, `init_datasets.sh` makes
the data, `verify_dataset.sh` checks it, `run_and_time.sh` runs and times one trial."""

_WHERE = """
## Where to look

| what | where |
|---|---|
| preprocessing, bit-exact with the reference | `input_preprocessing/` |
| order of the data | `implementations/bert/data/` |
| model and its initialisation | `implementations/bert/model/` |
| optimizer and learning rate | `implementations/bert/optim/`, `implementations/bert/training/schedule.py` |
| evaluation | `implementations/bert/training/evaluate.py` |
| the timed run | `implementations/bert/training/loop.py` |
"""

_ORGANIZATION = """\
# {organization}: MLPerf Training BERT

| system | accelerators | minutes | runs | how to run it |
|---|---|---|---|---|
{rows}

`systems/` describes the systems, `results/` has their logs, `benchmarks/` the code.
"""


def system_readme(system: str, organization: str, result: Result, description: dict[str, Any], code: Code) -> str:
    """README-SYSTEM.md. Raises ReviewError."""
    nodes, each = description.get("number_of_nodes", ""), description.get("accelerators_per_node", "")
    facts = {
        "system": description.get("system_name"),
        "nodes": nodes,
        "accelerators of a node": f"{each} x {description.get('accelerator_model_name', '')}",
        "processors of a node": f"{description.get('host_processors_per_node', '')} x "
        f"{description.get('host_processor_model_name', '')}",
        "framework": description.get("framework"),
        "software": listed(description.get("other_software_stack", "")),
        "operating system": description.get("operating_system"),
        "division": result.division,
        "samples of the RCP test": "train_samples (--rcp-bert-train-samples)" if result.terms.train_samples else None,
        "global batch size": None if result.batch_size is None else f"{result.batch_size:g}",
        "score": None if result.score is None else f"{result.score:.4f} minutes",
        "energy": f"{result.energy.joules:,.2f} J" if result.energy and result.energy.joules is not None else None,
    }
    rows = [f"| {name} | {_cell(value)} |" for name, value in facts.items() if value not in (None, "")]
    logged = [f"| `{name}` | {_cell(value)} |" for name, value in result.runs[0].hyperparameters.items()]
    own = all(code.has(path) for path in _OWN)  # this repository, or a fork of it
    return _SYSTEM.format(
        run_again=_RUN_AGAIN.format(config=code.config) if own else _RUN_OTHER,
        where=_WHERE if own else "",
        system=system,
        organization=organization,
        facts="\n".join(rows),
        commit=code.commit,
        config_text=code.read(code.config).strip(),
        hyperparameters="\n".join(logged),
    )


def organization_readme(organization: str, systems: list[str], root: Path, terms: Terms = USUAL) -> str:
    """README.md of the submission, one row a system. Raises ReviewError."""
    rows = []
    for system in systems:
        folder = root / "results" / system / "bert"
        for result in load_results(folder, terms=terms):
            implementations = root.glob(f"benchmarks/bert/implementations/*/README-{system}.md")
            links = ", ".join(f"[{path.name}]({path.relative_to(root).as_posix()})" for path in sorted(implementations))
            score = "" if result.score is None else f"{result.score:.4f}"
            accelerators = "" if result.accelerators is None else str(result.accelerators)
            rows.append(f"| {system} | {accelerators} | {score} | {len(result.runs)} | {links} |")
    return _ORGANIZATION.format(organization=organization, rows="\n".join(rows))


def _cell(value: Any) -> str:
    return listed(value).replace("|", "\\|")
