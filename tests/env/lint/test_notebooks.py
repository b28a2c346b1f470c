"""Notebooks: what their cells set, for the kernel, for shells of their own, and for files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ncclops.env.lint import Circumstances, LintFinding, lint
from ncclops.env.lint.inputs import of_file
from ncclops.env.lint.parse import guess_format, read

WHERE = Circumstances(nccl="2.32.3", torch="2.13.0")


def notebook(*cells: str, language: str = "python") -> str:
    """A notebook as Jupyter writes it: each line of a cell has one of its own."""
    code = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": cell.splitlines(True)}
        for cell in cells
    ]
    text = {"cell_type": "markdown", "metadata": {}, "source": ["export NCCL_DEBUG=TEXT\n"]}
    kernel: dict[str, Any] = {"kernelspec": {"language": language}}
    return json.dumps({"cells": [text, *code], "metadata": kernel, "nbformat": 4}, indent=1)


def findings(text: str, name: str = "n.ipynb") -> list[LintFinding]:
    return lint(read(text, guess_format(Path(name), text), Path(name)), WHERE)


def told(text: str, name: str = "n.ipynb") -> set[tuple[str, str]]:
    return {(f.rule, f.names[0]) for f in findings(text, name) if f.level != "note"}


@pytest.mark.parametrize(
    "cell",
    [
        "%env NCCL_DEBUG=LOUD",
        "%env NCCL_DEBUG LOUD",
        "%set_env NCCL_DEBUG = LOUD",
        "import os\nos.environ['NCCL_DEBUG'] = 'LOUD'",
        "!NCCL_DEBUG=LOUD torchrun t.py",
        "!echo a && export NCCL_DEBUG=LOUD && \\\n  torchrun t.py",
        "lines = !NCCL_DEBUG=LOUD torchrun t.py",
        "if x:\n    !NCCL_DEBUG=LOUD torchrun t.py",
        "%system NCCL_DEBUG=LOUD torchrun t.py",
        "%%bash\nexport NCCL_DEBUG=LOUD\ntorchrun t.py",
        "%%script bash\nNCCL_DEBUG=LOUD torchrun t.py",
        "%%writefile run.sh\nexport NCCL_DEBUG=LOUD",
        "%%writefile -a t.py\nimport os\nos.environ['NCCL_DEBUG'] = 'LOUD'",
        "%%time\n%env NCCL_DEBUG=LOUD",
    ],
)
def test_a_wrong_value_is_told_in_every_kind_of_cell(cell: str) -> None:
    assert told(notebook("x = 1", cell)) == {("bad-value", "NCCL_DEBUG")}


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("!export NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE"),
        ("!NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE"),
        ("%%bash\n# for the run\nexport CUDA_LAUNCH_BLOCKING=0", "CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_what_a_shell_only_sets_reaches_nothing(cell: str, name: str) -> None:
    assert ("own-shell", name) in told(notebook(cell, "!torchrun t.py"))


@pytest.mark.parametrize(
    "cell",
    [
        "!export NCCL_P2P_DISABLE=1 && torchrun t.py",
        "!export MINE=1",
        "%%bash\nexport NCCL_P2P_DISABLE=1\ntorchrun t.py",
        "%env NCCL_DEBUG={level}",
        "%env",
        "%%html\nNCCL_DEBUG=LOUD",
        "os.environ?",
        "%matplotlib inline\n%run -i t.py",
    ],
)
def test_nothing_is_told_of_what_is_right(cell: str) -> None:
    assert told(notebook(cell)) == set()


def test_the_cells_are_one_program() -> None:
    cells = ("%env NCCL_NET=IB", "not python (", "import os\nos.environ['NCCL_IB_DISABLE'] = '1'")
    assert ("net-ib-disabled", "NCCL_NET") in told(notebook(*cells))


def test_a_finding_has_the_line_of_the_file() -> None:
    text = notebook(
        "a = 'é'", "import os\n\n%env NCCL_DEBUG=LOUD\n", "!NCCL_IB_TIMEOUT=99 torchrun a"
    )
    lines = [text.splitlines()[f.line - 1] for f in findings(text) if f.level == "error"]
    assert ["LOUD" in lines[0], "99" in lines[1], len(lines)] == [True, True, 2]


def test_other_kernels() -> None:
    cell = "export NCCL_DEBUG=LOUD\ntorchrun t.py"
    assert told(notebook(cell, language="bash")) == {("bad-value", "NCCL_DEBUG")}
    assert told(notebook(cell, language="R")) == set()
    assert told("[]") == told('{"cells": 1}') == told('{"cells": ["a"]}') == set()


def test_a_script_that_was_saved_from_a_notebook() -> None:
    assert told("import os\n!export NCCL_DEBUG=INFO\n", "n.py") == {("own-shell", "NCCL_DEBUG")}
    usage = '"""Run:\n!export NCCL_DEBUG=INFO\n"""\n'
    assert told(usage, "n.py") == set()


def test_a_notebook_may_hold_pictures(tmp_path: Path) -> None:
    document = json.loads(notebook("%env NCCL_DEBUG=LOUD"))
    document["cells"][1]["outputs"] = [{"data": {"image/png": "A" * (2 << 20)}}]
    file = tmp_path / "n.ipynb"
    file.write_text(json.dumps(document, indent=1))
    assert [f.rule for f in lint(*of_file(str(file), None, WHERE))] == ["bad-value"]
