"""Public functions that take a path say in one line what they want, whatever they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops import receipt
from ncclops.classify import classify_paths
from ncclops.diagnose import diagnose
from ncclops.env import snapshot
from ncclops.errors import UsageError
from ncclops.flight import analyze
from ncclops.given_path import given_path
from ncclops.launch import read_verdict

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "diagnose": diagnose,
    "analyze": analyze,
    "receipt.check": receipt.check,
    "read_verdict": read_verdict,
    "snapshot.load": snapshot.load,
    "classify_paths": lambda given: classify_paths([given]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("given", [3, None, b"runs/x", ["runs/x"]], ids=repr)
def test_what_is_no_path_is_refused_in_one_line(name: str, given: object) -> None:
    with pytest.raises(UsageError, match=r": give the path of a ") as raised:
        FUNCTIONS[name](given)
    assert len(raised.value.lines) == 1


def test_text_and_paths_are_taken() -> None:
    assert given_path("runs/x", "a run") == given_path(Path("runs/x"), "a run") == Path("runs/x")
