"""What decides is tested in the fast tier: no module of values alone is without such a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import REPOSITORY

SOURCE, TESTS = REPOSITORY / "src", REPOSITORY / "tests"

# A module that imports one of these is at an edge: a process, a thread, a socket, a device, a
# terminal, a test runner. All others take values and return values, or read and write files.
EDGES = frozenset(
    {
        *("_posixsubprocess", "asyncio", "concurrent", "multiprocessing", "queue"),
        *("subprocess", "threading"),
        *("ctypes", "fcntl", "mmap", "psutil", "pynvml", "resource", "signal", "torch"),
        *("h11", "http", "hyperscan", "select", "selectors", "socket", "socketserver"),
        *("pty", "pytest", "rich", "termios", "typer"),
        *("lightning", "pytorch_lightning", "transformers"),  # with torch
    }
)

# Modules of values alone that no fast test imports, each with the reason. Not to grow.
EXCUSED = {
    "ncclops.worker.": "changes the process it runs in: sys.path, torch's functions, the script",
}


Import = tuple[str, str | None]


def _modules() -> dict[str, ast.Module]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


@cache
def _imports(tree: ast.Module) -> tuple[Import, ...]:
    """Module and name of each import, wherever it stands."""
    return tuple(_found_imports(tree))


def _found_imports(tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def _targets(tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    """The modules that ``tree`` imports; a name of a package stands for where it comes from."""
    found = set()
    for module, name in _imports(tree):
        if f"{module}.{name}" in modules:
            found.add(f"{module}.{name}")
        elif module in modules:
            found.add(module)
            found |= {origin for origin, other in _imports(modules[module]) if other == name}
    return found & modules.keys()


def _of_the_fast_tier(path: Path) -> bool:
    return not any(
        isinstance(node, ast.Assign)
        and "pytestmark" in ast.unparse(node.targets[0])
        and "slow" in ast.unparse(node.value)
        for node in ast.parse(path.read_text()).body
    )


def _imported_by_fast_tests(modules: dict[str, ast.Module]) -> set[str]:
    """Directly, or through a module of their own package that one of these tests imports."""
    found: set[str] = set()
    tests = filter(_of_the_fast_tier, TESTS.rglob("*.py"))
    new = {target for path in tests for target in _targets(ast.parse(path.read_text()), modules)}
    while new:
        found |= new
        new = {
            target
            for module in new
            for target in _targets(modules[module], modules)
            if target.split(".")[:2] == module.split(".")[:2]
        } - found
    return found


def test_each_module_that_decides_has_a_fast_test() -> None:
    modules = _modules()
    decides = {
        name
        for name, tree in modules.items()
        if any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))
        and not EDGES & {module.split(".")[0] for module, _ in _imports(tree)}
    }
    assert len(decides) > 100, "the walk over the source found too little"
    without = decides - _imported_by_fast_tests(modules)
    excused = {name for name in without if name.startswith(tuple(EXCUSED))}
    assert sorted(without - excused) == []
    unused = {prefix for prefix in EXCUSED if not any(name.startswith(prefix) for name in excused)}
    assert unused == set()
