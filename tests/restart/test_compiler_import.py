"""torch's compiler stays unloaded where only its name is asked for, and nobody notices."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import LIMIT_S, clean_environ

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, torch
from torch import overrides
from ncclops.restart.compiler_import import keep_compiler_unloaded, naming_frames

keep_compiler_unloaded()
with naming_frames():
    assert not hasattr(torch, "_inductor")
assert "torch._inductor" not in sys.modules
overrides.get_ignored_functions()  # as torch.compile does; it asks for torch's old names
assert not hasattr(torch, "no_such_name")
"""


def test_torch_filters_its_own_warnings_as_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
