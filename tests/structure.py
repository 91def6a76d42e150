"""The rules of test_structure.py as functions of a source tree: each returns one line per
violation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Module:
    """A Python file of a package, by its dotted name."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """Package that a relative import with one dot starts from."""
        return (
            self.name
            if self.path.name == "__init__.py"
            else self.name.rpartition(".")[0]
        )


def modules_of(folder: Path) -> dict[str, Module]:
    """Every module below a package's folder, except tests and data files."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return found


@cache
def imports(module: Module) -> tuple[tuple[str, int], ...]:
    """(dotted name, line) of a module's imports: top-level, in functions, relative, and by name at
    run time.
    """
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                source = resolve_name("." * node.level + source, module.package)
            for alias in node.names:
                yield (
                    source if alias.name == "*" else f"{source}.{alias.name}",
                    node.lineno,
                )
        elif (
            isinstance(node, ast.Call)
            and _called(node) in ("import_module", "__import__")
            and node.args
        ):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield resolve_name(name.value, module.package), node.lineno


def imported_modules(module: Module, modules: Mapping[str, Module]) -> dict[str, int]:
    """Modules of the same package that imports run, with line: those named, and their parent
    packages.
    """
    found: dict[str, int] = {}
    for name, line in imports(module):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        named = True
        while name and (named or not f"{module.name}.".startswith(f"{name}.")):
            if name in modules and name != module.name:
                found.setdefault(name, line)
            name, named = name.rpartition(".")[0], False
    return found


def upward_imports(
    modules: Mapping[str, Module], layers: Sequence[Collection[str]]
) -> list[str]:
    """Imports of a higher layer, modules without a layer, and table entries without a module.

    Args: layers: lowest first; names below the package, the longest that fits counts. The package's
    own ``__init__`` belongs to none and may be imported by all.
    """
    height = {name: number for number, names in enumerate(layers) for name in names}

    def layer(module: str) -> int | None:
        name = module.partition(".")[2]
        while name and name not in height:
            name = name.rpartition(".")[0]
        return height.get(name)

    problems = []
    for module in modules.values():
        if "." not in module.name:
            continue
        own = layer(module.name)
        if own is None:
            problems.append(f"{module.name} belongs to no layer: add it to LAYERS")
            continue
        for target, line in imported_modules(module, modules).items():
            above = layer(target)
            if above is not None and above > own:
                problems.append(
                    f"{module.name}:{line} imports {target}, a layer above it"
                )
    listed = {module.partition(".")[2] for module in modules}
    problems += [
        f"LAYERS names {name}, which does not exist"
        for name in sorted(set(height) - listed)
    ]
    return problems


def cycles(
    modules: Mapping[str, Module], known: Collection[frozenset[str]] = ()
) -> list[str]:
    """Import cycles between modules of any layer, and known cycles that are gone."""
    graph = {
        name: set(imported_modules(module, modules)) for name, module in modules.items()
    }
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
    }
    found = {group for group in groups if group}
    problems = [
        f"an import cycle: {', '.join(sorted(group))}"
        for group in sorted(found - set(known), key=sorted)
    ]
    return problems + [
        f"no longer a cycle: {', '.join(sorted(group))}" for group in set(known) - found
    ]


def package_cycles(packages: Iterable[Mapping[str, Module]]) -> list[str]:
    """Packages that import one another, directly or by way of others."""
    graph: dict[str, set[str]] = {}
    for modules in packages:
        for module in modules.values():
            own = module.name.partition(".")[0]
            used = {name.partition(".")[0] for name, _ in imports(module)}
            graph.setdefault(own, set()).update(used - {own})
    inside = {own: used & set(graph) for own, used in graph.items()}
    rings = sorted(own for own in inside if own in _reachable(inside, own))
    return [f"packages in a circle: {', '.join(rings)}"] if rings else []


def package_imports(
    packages: Iterable[Mapping[str, Module]],
) -> set[tuple[str, str]]:
    """(package, package that it imports), over all modules."""
    packages = list(packages)
    names = {name.partition(".")[0] for modules in packages for name in modules}
    found = {
        (module.name.partition(".")[0], imported.partition(".")[0])
        for modules in packages
        for module in modules.values()
        for imported, _ in imports(module)
    }
    return {(one, other) for one, other in found if one != other and other in names}


def mermaid_arrows(text: str) -> set[tuple[str, str]]:
    """Pairs of names with a solid arrow in the first Mermaid picture of a page."""
    picture = text.partition("```mermaid\n")[2].partition("```")[0]
    return set(re.findall(r"^ *(\w+)(?:\[.*?\])? --> (\w+)", picture, re.MULTILINE))


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def foreign_imports(
    modules: Mapping[str, Module],
    forbidden: Iterable[str],
    allowed: Mapping[str, Collection[str]],
) -> list[str]:
    """Imports of packages that are forbidden to these modules.

    Args: forbidden: names of packages and modules; allowed: what may be imported of them all the
    same, and by which modules (names, with all below them; "" for every one).
    """
    problems = []
    for module in modules.values():
        exempt = [
            name
            for name, users in allowed.items()
            if any(_within(module.name, user) for user in users)
        ]
        for name, line in imports(module):
            if any(_within(name, other) for other in forbidden) and not any(
                _within(name, free) for free in exempt
            ):
                problems.append(f"{module.name}:{line} imports {name}")
    return problems


def _within(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


def environment_readers(
    modules: Mapping[str, Module], allowed: Collection[str]
) -> list[str]:
    """Modules that access the process's environment through ``os``, under any name."""
    problems = []
    for module in modules.values():
        if module.name not in allowed:
            problems += [
                f"{module.name}:{line} reads the environment"
                for line in _environment_lines(module.tree)
            ]
    return problems


def _environment_lines(tree: ast.Module) -> Iterator[int]:
    aliases = {
        alias.asname or "os"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os" or (alias.name.startswith("os.") and not alias.asname)
    }

    def is_os(node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return (
                _called(node) in ("import_module", "__import__")
                and _first_text(node.args) == "os"
            )
        return isinstance(node, ast.Name) and node.id in aliases

    for node in ast.walk(tree):
        names: set[str | None] = set()
        if isinstance(node, ast.ImportFrom) and node.module == "os" and not node.level:
            names = {
                "environ" if alias.name == "*" else alias.name for alias in node.names
            }
        elif isinstance(node, ast.Attribute) and is_os(node.value):
            names = {node.attr}
        elif (
            isinstance(node, ast.Call)
            and _called(node) == "getattr"
            and is_os(node.args[0])
        ):
            names = {_first_text(node.args[1:])}
        if names & ENVIRONMENT:
            yield node.lineno  # type: ignore[attr-defined]


def _called(node: ast.Call) -> str:
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else getattr(node.func, "id", "")
    )


def _first_text(arguments: Sequence[ast.expr]) -> str | None:
    first = arguments[0] if arguments else None
    return (
        first.value
        if isinstance(first, ast.Constant) and isinstance(first.value, str)
        else None
    )


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
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found
    }


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


def table_problems(
    rows: Sequence[Sequence[str]], expected: Mapping[str, Sequence[str] | None]
) -> list[str]:
    """Missing, duplicate, wrong and ghost rows (of nothing that exists).

    Args: expected: the cells of each name's row, None where only the name matters.
    """
    named = [(name, row) for row in rows for name in names(row)]
    found = [name for name, _ in named]
    problems = [f"{name}: not in the table" for name in expected if name not in found]
    problems += [
        f"{name}: twice in the table"
        for name in sorted({name for name in found if found.count(name) > 1})
    ]
    problems += [
        f"{name}: in the table, but nothing has this name"
        for name in found
        if name not in expected
    ]
    for name, row in named:
        wanted = expected.get(name)
        if wanted is not None and list(row) != list(wanted):
            problems.append(
                f"{name}: the table says {' | '.join(row)}, and it is {' | '.join(wanted)}"
            )
    return problems


def names(row: Sequence[str]) -> list[str]:
    """Names in the first cell of a row, in backquotes."""
    return re.findall(r"`([^`]+)`", row[0])
