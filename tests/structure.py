"""The rules of pages and files of test_structure.py: each returns one line per violation."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

# As the rules of imports name them.
PACKAGES: list[str] = re.findall(
    r'"(\w+)"',
    re.findall(r"root_packages = (.*)", (Path(__file__).parents[1] / "pyproject.toml").read_text())[0],
)  # fmt: skip


def tracked(repository: Path, *patterns: str) -> list[Path]:
    """The files of the checkout that git does not ignore."""
    names = ["--cached", "--others", "--exclude-standard", *patterns]
    command = ["git", "-C", str(repository), "ls-files", *names]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = (repository / name for name in listed.stdout.split())
    return [path for path in found if path.is_file()]


def mermaid_arrows(text: str) -> set[tuple[str, str]]:
    """Pairs of names with a solid arrow in the first Mermaid picture of a page."""
    picture = text.partition("```mermaid\n")[2].partition("```")[0]
    return set(re.findall(r"^ *(\w+)(?:\[.*?\])? --> (\w+)", picture, re.MULTILINE))


def dead_links(path: Path) -> list[str]:
    """Links of a page to a missing file or heading."""
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        if ":" in target:
            continue
        page = path.parent / name if name else path
        if not page.exists():
            problems.append(f"{path}: {target}: no such file")
        elif heading and heading not in _headings(page):
            problems.append(f"{path}: {target}: no such heading")
    return problems


def _headings(page: Path) -> set[str]:
    """Headings of a page, as links name them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in found}


def unfit_for_the_tree(path: Path, is_test: bool) -> list[str]:
    """Files over 1 MB (tests: 100 KB), and binaries outside tests."""
    data = path.read_bytes()
    most = 100_000 if is_test else 1_000_000
    if len(data) >= most:
        return [f"{path}: {len(data):,} bytes, less than {most:,} are allowed"]
    return [f"{path} is binary"] if b"\0" in data and not is_test else []


def tables(text: str, header: str) -> list[list[str]]:
    """Cells of every row of the Markdown tables whose header starts with this cell."""
    rows, inside = [], False
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if not cells:
            inside = False
        elif not before.startswith("|"):
            inside = cells[0] == header
        elif inside and set(cells[0]) - set("-: "):
            rows.append(cells)
    return rows


def words(text: str) -> int:
    """Number of words on a page; the lines of its tables are none."""
    return len(re.findall(r"\S*\w\S*", text))


def table_problems(
    rows: Sequence[Sequence[str]], expected: Mapping[str, Sequence[str] | None]
) -> list[str]:
    """Missing, duplicate, wrong and ghost rows (of nothing that exists).

    Args: expected: the cells of each name's row, None where only the name matters.
    """
    named = [(name, row) for row in rows for name in names(row)]
    found = [name for name, _ in named]
    twice = sorted({name for name in found if found.count(name) > 1})
    ghosts = [name for name in found if name not in expected]
    problems = [f"{name}: not in the table" for name in expected if name not in found]
    problems += [f"{name}: twice in the table" for name in twice]
    problems += [f"{name}: in the table, but nothing has this name" for name in ghosts]
    for name, row in named:
        wanted = expected.get(name)
        if wanted is not None and list(row) != list(wanted):
            cells = f"{' | '.join(row)}, and it is {' | '.join(wanted)}"
            problems.append(f"{name}: the table says {cells}")
    return problems


def names(row: Sequence[str]) -> list[str]:
    """Names in the first cell of a row, in backquotes."""
    return re.findall(r"`([^`]+)`", row[0])
