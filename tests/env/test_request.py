"""``--set``, ``--unset`` and ``--keep`` as values; the profile that a request means."""

from __future__ import annotations

from typing import Any

import pytest

from ncclops.env import plan_environment
from ncclops.env.request import overrides_of, parse_overrides, resolve_profile
from ncclops.errors import ProfileError, UsageError


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


@pytest.mark.parametrize(
    ("default", "refs", "name"),
    [
        ("local-cpu", [], "local-cpu"),
        (" local-cpu , expert-parallel,", [], "local-cpu+expert-parallel"),
        ("local-cpu", ["regional-compile"], "local-cpu+regional-compile"),
        ("single-node-h200", ["local-cpu"], "local-cpu"),
    ],
)
def test_a_variable_names_the_profile_where_no_lane_is_named(
    default: str, refs: list[str], name: str
) -> None:
    said: list[str] = []
    environ = {"NCCLOPS_PROFILE": default}
    assert resolve_profile(refs, environ=environ, say=said.append).name == name
    assert [line for line in said if "by NCCLOPS_PROFILE" in line] == said
    assert bool(said) == ("local-cpu" not in refs)
    assert plan_environment(refs, environ=environ).profile == name


def test_a_default_profile_that_is_not_there_is_refused_by_the_variables_name() -> None:
    environ = {"NCCLOPS_PROFILE": "local-cp"}
    with pytest.raises(ProfileError, match=r"^NCCLOPS_PROFILE: unknown .* mean local-cpu\?"):
        resolve_profile([], environ=environ, say=print)
    with pytest.raises(ProfileError) as raised:
        resolve_profile([], environ={"NCCLOPS_PROFILE": "a-lane,an-overlay"}, say=print)
    assert [line.split(";")[0] for line in raised.value.lines] == [
        "NCCLOPS_PROFILE: unknown profile 'a-lane'",
        "NCCLOPS_PROFILE: unknown profile 'an-overlay'",
    ]


def test_a_value_that_is_no_text_is_refused_where_python_gives_it() -> None:
    given: Any = {"A": 1}
    with pytest.raises(UsageError, match="env: A is 1: give text, or None to remove"):
        overrides_of(given, ())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"keep": "NCCL_DEBUG"}, "keep: give a list of names, not 'NCCL_DEBUG'"),
        ({"keep": [5]}, "variable 5: not the name"),
        ({"env": ["A=1"]}, "env: give a mapping of names to values"),
        ({"profile": 5}, "profile: give a name or a list of names, not 5"),
        ({"profile": [5]}, "profile: give a name"),
    ],
)
def test_what_is_of_another_type_is_not_taken_for_something_else(
    arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        plan_environment(**({"profile": "local-cpu"} | arguments))
