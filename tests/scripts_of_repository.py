"""The programs in ``scripts/``, as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.conftest import REPOSITORY


def load_script(name: str) -> ModuleType:
    """``scripts/<name>.py``."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
