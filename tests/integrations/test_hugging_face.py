"""What the callback does to the process that a stop ends."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("transformers")
from tqdm.auto import tqdm

from ncclops.integrations.hugging_face import _close_progress_bars


def test_a_stop_leaves_no_progress_bar_open() -> None:
    """The Trainer's own callback closes them, and comes after the one that ends the process."""
    bars = [tqdm(total=3, file=io.StringIO()), tqdm(total=2, file=io.StringIO())]
    bars[0].update(1)
    _close_progress_bars()
    assert not [bar for bar in bars if bar in tqdm._instances]
