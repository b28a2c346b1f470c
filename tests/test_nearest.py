"""What somebody may have meant who wrote a word that is not known."""

from __future__ import annotations

import pytest

from ncclops.nearest import meant, nearest

KNOWN = ["local-cpu", "single-node-h200", "multi-host-h200"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lokal-cpu", "; did you mean local-cpu?"),
        ("LOCAL-CPU", "; did you mean local-cpu?"),
        ("zzz", "; known: local-cpu, single-node-h200, multi-host-h200"),
    ],
)
def test_the_closest_word_in_any_case_or_all_of_them(word: str, said: str) -> None:
    assert nearest(word, KNOWN) == said


def test_where_none_is_close_it_is_what_the_caller_says() -> None:
    assert nearest("zzz", KNOWN, or_else=": ask") == ": ask"
    assert nearest("zzz", []) == ""
    assert meant("zzz", KNOWN) == []


def test_several_where_they_are_asked_for() -> None:
    assert meant("multi-node-h200", KNOWN, 3)[:2] == ["multi-host-h200", "single-node-h200"]
    assert len(meant("multi-node-h200", KNOWN)) == 1
