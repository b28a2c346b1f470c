"""Names of a package that are imported when they are first used, because their module is heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, origins: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``; ``origins`` has the module within it for each name.

    What it returns raises ``AttributeError`` for any other name.
    """

    def getattr_of_package(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{origins[name]}"), name)

    return getattr_of_package
