"""The random number generators of a process, as one thing to be kept."""

from __future__ import annotations

import random
import sys
from typing import Any


class Rng:
    """The states of Python's, numpy's and torch's generators of this process, to be kept.

    Those of the process: ``random``, ``numpy.random`` if numpy is imported, torch's on the CPU and
    on the current CUDA device if CUDA is in use. ``generators`` are further ones, such as that of a
    sampler: ``random.Random``, ``numpy.random.Generator``, ``torch.Generator``.
    """

    def __init__(self, *generators: Any) -> None:
        self._generators = generators
        for each in generators:
            _read(each)

    def state_dict(self) -> dict[str, Any]:
        """The present states."""
        import torch

        numpy = sys.modules.get("numpy")
        return {
            "python": random.getstate(),
            "numpy": None if numpy is None else numpy.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            "further": [_read(each) for each in self._generators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put ``state`` back. Raises ``ValueError`` where there are other generators than then."""
        import torch

        random.setstate(state["python"])
        if state["numpy"] is not None:
            import numpy

            numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
        for generator, kept in zip(self._generators, state["further"], strict=True):
            _write(generator, kept)


def _read(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    if hasattr(generator, "get_state"):
        return generator.get_state()
    raise TypeError(f"{type(generator).__qualname__} is no generator of Python, numpy or torch")


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
