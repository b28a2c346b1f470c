"""The names and parameters that docs/snapshots.md promises."""

from __future__ import annotations

import inspect

from ncclops import restart
from ncclops.restart import snapshot
from tests.conftest import REPOSITORY

PARAMETERS = {
    "self": None,
    "state": inspect.Parameter.empty,
    "replicated": (),
    "shard": "",
    "every": None,
    "budget": 0.02,
    "checkpoint": None,
    "partner": True,
    "overlap": True,
    "domain": None,
    "memory_for_partner": None,
    "store": None,
    "name": "",
}


def test_the_public_names_are_the_promised_ones() -> None:
    assert restart.snapshot is snapshot
    assert snapshot.__all__ == [
        "Overhead",
        "PeerError",
        "Restored",
        "Rng",
        "SnapshotError",
        "Snapshots",
        "Source",
    ]
    assert [each.value for each in snapshot.Source] == [
        "memory",
        "replica",
        "partner",
        "checkpoint",
        "nothing",
    ]


def test_the_parameters_are_the_promised_ones() -> None:
    ours = inspect.signature(snapshot.Snapshots.__init__).parameters
    assert list(ours) == list(PARAMETERS)
    for name, default in list(PARAMETERS.items())[1:]:
        assert ours[name].default == default, name
    keywords = [each for name, each in ours.items() if name not in ("self", "state")]
    assert {each.kind for each in keywords} == {inspect.Parameter.KEYWORD_ONLY}


def test_the_page_names_every_example() -> None:
    page = (REPOSITORY / "docs" / "snapshots.md").read_text()
    examples = (REPOSITORY / "docs" / "examples").glob("snapshot_*.py")
    assert all(f"examples/{each.name}" in page for each in examples)
