"""A bar is cut by the columns that it takes on a terminal."""

from __future__ import annotations

import pytest

from ncclops.agent.bar_text import fitted

TQDM = " 92%|█████████▏| 55/60 [00:05<00:00,  9.81it/s]"


@pytest.mark.parametrize(
    ("bar", "columns", "shown"),
    [
        (TQDM, 47, TQDM),
        (TQDM, 80, TQDM),
        (TQDM, 10, TQDM[:10]),
        (TQDM, 0, ""),
        ("漢字漢字", 5, "漢字 "),
        ("\x1b[32m10%\x1b[0m|##", 6, "\x1b[32m10%\x1b[0m|##\x1b[m"),
        ("\x1b[32m10%\x1b[0m|##", 2, "\x1b[32m10\x1b[m"),
        ("\x1b[A\x1b[2K 10%\x1b[?25l\x1bM|\x1b", 80, " 10%|"),
    ],
)
def test_it_is_cut_by_columns(bar: str, columns: int, shown: str) -> None:
    assert fitted(bar.encode(), columns) == shown.encode()


def test_half_a_character_is_left_out() -> None:
    assert fitted("10%|█".encode()[:-1], 80) == b"10%|"
