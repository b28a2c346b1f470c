"""Failures as different software words them: short logs of our own, and what they come to."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ncclops.classify import classify_bytes
from ncclops.classify.xids import catalogue
from tests.classify.shipped import LOADED

TABLE = tomllib.loads(Path(__file__).with_name("vocabulary.toml").read_text(encoding="utf-8"))
LOGS = [(entry["text"], entry["class"]) for entry in TABLE["log"]]
HARMLESS = [entry["text"] for entry in TABLE["harmless"]]


@pytest.mark.parametrize(("log", "class_"), LOGS)
def test_a_failure_has_its_class(log: str, class_: str) -> None:
    verdict = classify_bytes(f"{log}\n".encode(), LOADED).verdict
    assert verdict.class_ == class_, verdict


@pytest.mark.parametrize("log", HARMLESS)
def test_what_only_looks_bad_is_no_failure(log: str) -> None:
    report = classify_bytes(f"{log}\n".encode(), LOADED)
    assert report.verdict.class_ == "benign", report.verdict
    assert all("is harmless: " in note for note in report.notes) and report.notes


@pytest.mark.parametrize("number", sorted(catalogue()))
def test_each_xid_of_the_catalogue_comes_with_its_remedy(number: int) -> None:
    line = (
        f"NVRM: Xid (PCI:0000:cb:00): {number}, pid=7, name=python, some words (GPU Reset Required)"
    )
    verdict = classify_bytes(f"{line}\n".encode(), LOADED).verdict
    if number in (106, 107):  # tests of the driver's own
        assert not verdict.names_failure
        return
    assert verdict.class_ in ("gpu-hardware", "cuda-error", "process-crash")
    assert verdict.remedy[0].startswith(f"Xid {number} (")
    application = catalogue()[number].action == "RESTART_APP"
    assert not (application and verdict.eligible) or number == 94
