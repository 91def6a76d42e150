"""The README files of a package: what was run, where a reviewer finds what, and how to run it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from review.results.score import USUAL, Result, Terms, load_results
from review.rulebook.description import listed
from review.submission.code import Code

_OWN = ("run.sub", "implementations/bert/training/loop.py")


def system_readme(system: str, organization: str, result: Result, description: dict[str, Any], code: Code) -> str:
    """README-SYSTEM.md. Raises ReviewError."""
    each, processors = (description.get(f"{kind}_per_node", "") for kind in ("accelerators", "host_processors"))
    facts = {
        "system": description.get("system_name"),
        "nodes": description.get("number_of_nodes"),
        "accelerators of a node": f"{each} x {description.get('accelerator_model_name', '')}",
        "processors of a node": f"{processors} x {description.get('host_processor_model_name', '')}",
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
    about = {"system": system, "organization": organization, "commit": code.commit}
    again = _filled("run_again", config=code.config) if own else _filled("run_other")
    tables = {"facts": "\n".join(rows), "hyperparameters": "\n".join(logged)}
    where, config = f"\n{_filled('where')}" if own else "", code.read(code.config).strip()
    return _filled("system", run_again=again, where=where, config_text=config, **about, **tables) + "\n"


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
    return _filled("organization", organization=organization, rows="\n".join(rows)) + "\n"


def _filled(template: str, **values: str) -> str:
    content = Path(__file__).with_name("templates").joinpath(f"{template}.md").read_text(encoding="utf-8")
    return content.format(**values).strip()


def _cell(value: Any) -> str:
    return listed(value).replace("|", "\\|")
