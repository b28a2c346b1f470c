"""Whose code a frame is, and which frame of many is the user's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ncclops
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import (
    _AFTER_SCRIPT,
    Owner,
    import_under_way,
    is_framework,
    is_users,
    out_of_script,
    owner,
    user_frame,
    user_frames,
)

TORCH = "/opt/lib/python3.12/site-packages/torch"
OURS = Path(ncclops.__file__).parent


@pytest.mark.parametrize(
    ("file", "framework"),
    [
        (f"{TORCH}/nn/modules/module.py", True),
        ("/opt/lib/python3.12/selectors.py", True),
        ("<frozen importlib._bootstrap>", True),
        ("/venv/lib/python3.11/site-packages/ncclops/restart/wrap.py", True),
        ("/src/ncclops/worker/script.py", True),
        ("/venv/lib/python3.11/site-packages/typing_extensions.py", True),
        ("/venv/lib/python3.11/site-packages/transformers/trainer.py", False),
        ("/home/user/torch_experiments/train.py", False),
        ("/build/torch/_dynamo/eval_frame.py", True),
        ("/usr/lib/python3/dist-packages/trainer.py", False),
        ("<eval_with_key>.12", True),
        ("<stdin>", False),
        ("<ipython-input-3-abc>", False),
        ("/home/user/ncclops/examples/train.py", False),
    ],
)
def test_whose_code_it_is(file: str, framework: bool) -> None:
    """Installed packages of others are not the framework's, and not quite the user's."""
    assert is_framework(file) == framework


def test_the_users_own_frame_comes_before_a_packages() -> None:
    """A trainer that is installed stands in only where nothing else is the user's."""
    package = Frame("/venv/lib/python3.11/site-packages/trl/trainer.py", 1, "train")
    own = Frame("/home/user/train.py", 2, "main")
    assert user_frame([package, own]) == own
    assert user_frame([package]) == package
    assert user_frames([package, own, package]) == (own, package)
    assert user_frames([package, package]) == (package, package)


def test_every_package_of_ours_is_ours_wherever_it_is_installed() -> None:
    for path in OURS.glob("*/*.py"):
        assert owner(f"/somewhere/ncclops/{path.relative_to(OURS)}") is Owner.FRAMEWORK, path


def test_an_installed_package_is_not_quite_the_users() -> None:
    assert is_users(Frame("/home/user/train.py", 2, "main"))
    assert not is_users(Frame("/venv/lib/python3.11/site-packages/trl/trainer.py", 1, "train"))


def test_a_stack_of_torch_alone_has_no_user_frame() -> None:
    assert user_frame([Frame(f"{TORCH}/nn/modules/module.py", 1, "_call_impl")]) is None
    assert user_frames([]) == ()


def test_the_functions_that_run_once_the_script_has_been_left_exist() -> None:
    for file, named in _AFTER_SCRIPT.items():
        tree = ast.parse((OURS / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert set(named) <= functions


def test_waiting_in_our_loop_is_known_by_file_and_function() -> None:
    loop = "/v/lib/python3.12/site-packages/ncclops/restart/loop.py"
    assert out_of_script(Frame(loop, 2, "Loop._await_outcome")) is not None
    assert out_of_script(Frame(loop, 2, "Loop._iterate")) is None
    assert out_of_script(Frame("/home/user/loop.py", 2, "_await_outcome")) is None
    printed = loop.replace("restart/loop", "worker/printed")
    assert out_of_script(Frame(printed, 2, "Printed.explain")) == (
        "out of the script, by an exception"
    )
    assert out_of_script(Frame(printed, 2, "_await_abort")) is None


@pytest.mark.parametrize(
    ("below", "asked_for"),
    [
        ([(f"{TORCH}/_dynamo/config.py", "<module>"), "_find_and_load"], "_dynamo/config.py"),
        (
            [
                ("/usr/lib/python3.12/linecache.py", "getlines"),
                (f"{TORCH}/_dynamo/config.py", "<module>"),
                "_find_and_load",
                (f"{TORCH}/_dynamo/__init__.py", "<module>"),
                "_find_and_load",
                (f"{TORCH}/distributed/distributed_c10d.py", "init_process_group"),
            ],
            "_dynamo/__init__.py",
        ),
    ],
    ids=["of the line", "below a call"],
)
def test_an_import_is_named_by_the_module_that_is_asked_for(
    below: list[str | tuple[str, str]], asked_for: str
) -> None:
    frames = [
        Frame("<frozen importlib._bootstrap>", 1, each) if isinstance(each, str) else
        Frame(each[0], 1, each[1])
        for each in below
    ]  # fmt: skip
    train = Frame("/home/me/train.py", 9, "main")
    assert import_under_way([*frames, train]) == f"an import ({TORCH}/{asked_for})"
    # A script that is itself imported is in no import.
    assert import_under_way([train, *frames]) is None


def test_an_import_that_still_looks_for_its_file_is_one() -> None:
    finding = Frame("<frozen importlib._bootstrap_external>", 140, "_path_stat")
    assert import_under_way([finding, Frame("/home/me/train.py", 9, "main")]) == "an import"
