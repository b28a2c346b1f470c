"""The map in docs/architecture.md holds: which package imports which, and which import no torch."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import ncclops
from tests.conftest import REPOSITORY, clean_environ

ROOT = Path(ncclops.__file__).parent
# Single modules at the top: values and helpers without a place of their own, free for all.
EVERYWHERE = {
    "errors",
    "exhausted",
    "exit_codes",
    "flight_recorders",
    "given_path",
    "durations",
    "lazy_names",
    "rank_lists",
    "moments",
    "nearest",
    "host_name",
    "plain_text",
    "process_ends",
    "toml_files",
    "versions",
    "whole_numbers",
    "_version",
}
# What holds torch processes or is loaded by torch's users; all other packages import none.
WITH_TORCH = {"restart", "worker", "integrations"}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("ncclops", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ncclops that ``name`` imports: at the top, in functions, for types."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(above + ([node.module] if node.module else []))
            names = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                for alias in node.names
            ]
        else:
            continue
        yield from (each for each in names if each in known and each != name)


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


KNOWN = modules()


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """Of every module. Reading them takes seconds, which a run of other tests does not need."""
    return {name: set(imports(name, path, KNOWN)) for name, path in KNOWN.items()}


def documented() -> dict[str, set[str]]:
    """The table of docs/architecture.md: for each package, the packages that it may import."""
    rows = {}
    for line in (REPOSITORY / "docs" / "architecture.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`ncclops."):
            name = cells[0].strip("`").removeprefix("ncclops.")
            rows[name] = {each.strip(" `") for each in cells[2].split(",")} - {"-"}
    return rows


MAP = documented()


def test_every_package_is_on_the_map() -> None:
    packages = {package_of(name) for name in KNOWN if "." in name}
    assert packages - EVERYWHERE - {"__main__"} == set(MAP)


@pytest.mark.parametrize("package", MAP)
def test_a_package_imports_only_what_the_map_allows(package: str) -> None:
    """Imports in functions and for type checkers count as well."""
    allowed = MAP[package]
    wrong = [
        f"{name} -> {each}"
        for name, found in all_imports().items()
        if package_of(name) == package
        for each in found
        if package_of(each) not in allowed | EVERYWHERE | {package, "ncclops"}
        and each.removeprefix("ncclops.") not in allowed
    ]
    assert not wrong


def test_the_map_has_no_cycles() -> None:
    """Read from the top, each package imports only packages that stand above it."""
    seen: set[str] = set()
    for package, allowed in MAP.items():
        assert {each.partition(".")[0] for each in allowed} <= seen, package
        seen.add(package)


def test_no_files_import_each_other_in_a_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for each in all_imports()[name]:
            if each.count(".") > 1:  # a package's own face may import its modules
                visit(each, (*path, name))
        done.add(name)

    for name in all_imports():
        if name.count(".") > 1:
            visit(name, ())


def test_contributing_names_files_that_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## Where a change goes")[2]
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_*]*(?:\.[a-z]+)?)`", text)
    assert len(named) > 15
    assert [
        path for path in named if not list(ROOT.glob(path)) and not (REPOSITORY / path).exists()
    ] == []


def test_no_process_of_ours_imports_from_the_current_directory() -> None:
    """Whoever can write there, as in /tmp, would have their modules run."""
    interpreters = {"sys.executable", "python"}
    commands = [
        (name, [ast.unparse(each) for each in node.elts])
        for name, path in KNOWN.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) in interpreters
    ]
    assert len(commands) > 10
    assert [each for each in commands if not {"'-P'", "'-I'"} & set(each[1])] == []


@pytest.mark.slow
def test_importing_what_needs_no_torch_imports_none() -> None:
    names = [
        name
        for name in KNOWN
        if package_of(name) not in WITH_TORCH
        and not name.endswith("__main__")
        and (name != "ncclops.traces.otlp" or find_spec("opentelemetry") is not None)  # an extra
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
