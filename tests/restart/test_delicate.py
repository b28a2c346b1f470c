"""Where torch's C++ may call Python and take no exception, the main thread is not interrupted."""

from __future__ import annotations

import dis
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from ncclops.restart._interrupt.delicate import Delicate, how_delicate

TORCH = Path(torch.__file__).parent


def code(name: str, file: Path | str = "train.py") -> CodeType:
    """Of a function that calls another one."""
    functions: dict[str, Any] = {}
    exec(compile(f"def {name}(): other()", str(file), "exec"), functions)

    result: CodeType = functions[name].__code__
    return result


def at(operation: str, function: CodeType) -> int:
    return next(each.offset for each in dis.get_instructions(function) if each.opname == operation)


COMPILERS = [TORCH / "_dynamo/convert_frame.py", TORCH / "_inductor/compile_fx.py"]


@pytest.mark.parametrize("compiler", COMPILERS, ids=["dynamo", "inductor"])
def test_a_compile_is_interrupted_between_its_calls(compiler: Path) -> None:
    """An exception that arrived in what C++ had called ended the process: ``std::terminate``."""
    assert compiler.exists()
    inner, stack = code("run_node"), [code("_compile", compiler), code("train")]
    assert how_delicate([inner, *stack], at("RESUME", inner)) is Delicate.NO
    assert how_delicate([inner, *stack], at("CALL", inner)) is Delicate.BRIEFLY
    assert how_delicate([inner, *stack]) is Delicate.BRIEFLY


@pytest.mark.parametrize(
    "called",
    [
        code("__torch_dispatch__"),
        code("find_torch_dispatch_rule"),
        code("guard_int", TORCH / "fx/experimental/sym_node.py"),
    ],
    ids=["mode", "rule", "number"],
)
def test_what_torch_calls_of_a_tensor_is_not_interrupted_while_it_compiles(
    called: CodeType,
) -> None:
    inner, train = code("lookup"), code("train")
    stack = [inner, called, code("_compile", COMPILERS[0]), train]
    assert how_delicate(stack, at("RESUME", inner)) is Delicate.BRIEFLY
    assert how_delicate([inner, called, train], at("CALL", inner)) is Delicate.NO
