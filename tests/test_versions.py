"""Conditions on the torch version."""

from __future__ import annotations

import pytest

from ncclops.versions import parse_spec, release, satisfies


@pytest.mark.parametrize(
    ("version", "spec", "holds"),
    [
        ("2.13.0+cpu", ">=2.8", True),
        ("2.13.0+cpu", ">=2.14", False),
        ("2.14.0.dev20260901", ">=2.14", True),
        ("2.15.0a0+gitabc", ">=2.15", True),
        ("2.8", "==2.8.0", True),
        ("2.8.1", "!=2.8", True),
        ("2.9.1", ">=2.8,<2.10", True),
        ("2.10.0", ">=2.8,<2.10", False),
        ("2.9.1", "> 2.9 , <= 2.9.1", True),
        ("2.8.0-built_here", ">=2.8,<2.8.1", True),
        ("2.10", ">=2.9.5", True),
        ("2", "<2.0.1", True),
        ("0.0", "==0", True),
    ],
)
def test_satisfies_compares_releases_number_by_number(version: str, spec: str, holds: bool) -> None:
    assert satisfies(version, spec) is holds


@pytest.mark.parametrize("spec", ["", "2.8", "~=2.8", ">=x", ">=2.8,", ">=2.8 or <2"])
def test_what_is_no_condition_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="is not a version condition"):
        parse_spec(spec)


def test_zeros_at_the_end_make_no_other_release() -> None:
    assert release("2.27") == release("2.27.0") < release("2.27.0.1") < release("2.27.1")


def test_release_needs_a_number_first() -> None:
    with pytest.raises(ValueError, match="'nightly' is not a version"):
        release("nightly")
