"""``--set``, ``--unset`` and ``--keep`` as values."""

from __future__ import annotations

import pytest

from ncclops.env.request import parse_overrides
from ncclops.errors import UsageError


def test_assignments_and_names() -> None:
    asked = parse_overrides(["A=1", "B=x=y", "C="], ["D", "E_2"], ["F"])
    assert asked.set == {"A": "1", "B": "x=y", "C": ""}
    assert (asked.unset, asked.keep) == (frozenset({"D", "E_2"}), frozenset({"F"}))


def test_the_last_of_several_values_holds() -> None:
    assert parse_overrides(["A=1", "A=2"], None, None).set == {"A": "2"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((["A"], None, None), "--set A: write it as NAME=VALUE"),
        ((["=1"], None, None), "--set '': not the name"),
        ((["A B=1"], None, None), "--set 'A B': not the name"),
        ((None, ["1A"], None), "--unset '1A': not the name"),
        ((None, None, ["A=1"]), "--keep 'A=1': not the name"),
    ],
)
def test_what_is_no_variable_is_named_with_its_option(
    given: tuple[list[str] | None, list[str] | None, list[str] | None], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        parse_overrides(*given)
