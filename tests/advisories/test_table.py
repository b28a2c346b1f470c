"""The shipped table holds together: each entry has a source, valid conditions, an id of its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from ncclops.advisories import SEVERITIES, Advisory, advisories
from ncclops.advisories.table import read
from ncclops.env.catalogue import catalogue
from ncclops.restart.regroup import Rung
from ncclops.versions import parse_spec, release

EVERY = advisories()


def conditions(advisory: Advisory) -> Iterator[str]:
    when = advisory.when
    yield from (*when.nccl, *when.torch, *when.driver, *when.ranks)
    if when.plugin is not None:
        yield from when.plugin.version


@pytest.mark.parametrize(
    ("when", "is_allowed"),
    [
        ('{ nccl = [">=2.28,<2.29"], restart = ["in-process"] }', True),
        ('{ torch = ["==2.14.0"], nccl = ["==2.30.3"], restart = ["in-process"] }', True),
        ('{ nccl = [">=2.28,<2.29"] }', False),
        ('{ restart = ["in-process"] }', False),
        ('{ nccl = ["==2.28.9"], restart = ["in-process"], nodes = "many" }', False),
        ('{ nccl = ["==2.28.9"], restart = ["in-process"], use = "the network is slow" }', False),
    ],
)
def test_a_rung_is_ruled_out_by_what_a_worker_knows(when: str, is_allowed: bool) -> None:
    text = f"""
        [[advisory]]
        id = "x"
        title = "x"
        severity = "low"
        symptom = "x."
        remedy = "x."
        sources = []
        rules_out = ["shrunk", "kept", "reconfigured"]
        when = {when}
    """
    if is_allowed:
        (entry,) = read(text)
        assert {*entry.rules_out} == {each.value for each in Rung} - {Rung.ANEW.value}
        return
    with pytest.raises(ValueError, match="x: with rules_out"):
        read(text)


def test_no_id_and_no_title_is_there_twice() -> None:
    for names in ([each.id for each in EVERY], [each.title for each in EVERY]):
        assert [name for name, count in Counter(names).items() if count > 1] == []
    assert len(EVERY) >= 25


@pytest.mark.parametrize("advisory", EVERY, ids=lambda each: each.id)
def test_an_entry_is_whole(advisory: Advisory) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]+", advisory.id)
    assert advisory.severity in SEVERITIES
    assert advisory.sources
    assert len(set(advisory.sources)) == len(advisory.sources)
    for source in advisory.sources:
        assert re.fullmatch(r"https://[^\s]+/[^\s]+", source)
    assert len(advisory.title) <= 100
    assert not advisory.title.endswith(".")
    for sentence in (advisory.symptom, advisory.remedy):
        assert sentence.strip().endswith(".")
    for condition in conditions(advisory):
        parse_spec(condition)
    for version in advisory.fixed_in.values():
        release(version)


@pytest.mark.parametrize("advisory", EVERY, ids=lambda each: each.id)
def test_an_entry_is_limited_and_ends_where_it_is_fixed(advisory: Advisory) -> None:
    when = advisory.when
    limits = (when.nccl, when.torch, when.driver, when.plugin, when.fabric_manager, when.env)
    assert any(limits) or when.use
    fixed = {"nccl": when.nccl, "torch": when.torch, "driver": when.driver}
    if when.plugin is not None:
        fixed[when.plugin.name] = when.plugin.version
    for component, version in advisory.fixed_in.items():
        for condition in fixed[component]:
            ends = [want for sign, want in parse_spec(condition) if sign in ("<", "<=", "==")]
            assert ends, condition
            assert min(ends) <= release(version), condition


@pytest.mark.parametrize("advisory", EVERY, ids=lambda each: each.id)
def test_its_variables_are_in_the_catalogue(advisory: Advisory) -> None:
    assert set(advisory.when.env) <= set(catalogue())


WHOLE = """
[[advisory]]
id = "x"
title = "t"
severity = "high"
symptom = "S."
remedy = "R."
sources = ["https://a/b"]
when = { nccl = ["==2.25.1"] }
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('severity = "high"', 'severity = "bad"'),
        ("when = { nccl", "when = { ncl"),
        ('sources = ["https://a/b"]\n', ""),
        ('["==2.25.1"]', '"==2.25.1"'),
    ],
)
def test_a_mistake_in_an_entry_is_refused(old: str, new: str) -> None:
    assert [each.id for each in read(WHOLE)] == ["x"]
    assert old in WHOLE
    with pytest.raises(ValueError, match=r"Object|Invalid|Expected"):
        read(WHOLE.replace(old, new))
