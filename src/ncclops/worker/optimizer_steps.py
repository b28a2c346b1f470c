"""Counts the updates of the script's optimizers, for scripts that report no steps.

Between an update and the next one lies what a stop needs: a point that all ranks pass equally
often, with the same collectives before it. The count also shows that such a script makes progress.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ncclops.receipts import recorder
from ncclops.worker import after_import

_MODULE = "torch.optim.optimizer"


def count() -> None:
    """Count from the import of torch's optimizers on; a script without them pays nothing."""
    after_import.act(_MODULE, _register)


def _register(module: ModuleType) -> None:
    def after_update(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        import torch  # not before: it is being imported when this is registered

        # In a compiled update this is traced, and must come to nothing.
        if not torch.compiler.is_compiling():
            recorder.current().update()

    module.register_optimizer_step_post_hook(after_update)
