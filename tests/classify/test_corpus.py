"""Scores on labelled excerpts of real logs, where those are present, and how they are counted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ncclops.classify import load_signatures
from tests.scripts_of_repository import load_script

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT.parent / "shared" / "corpus" / "dev.jsonl"


@pytest.fixture(scope="module")
def scoring() -> ModuleType:
    return load_script("score_classify")


@pytest.fixture(scope="module")
def merging() -> ModuleType:
    return load_script("score_first_failure")


@pytest.mark.skipif(not CORPUS.exists(), reason=f"no labelled excerpts at {CORPUS}")
def test_scores_on_real_excerpts(scoring: ModuleType) -> None:
    scored = scoring.score(CORPUS, load_signatures())
    assert [item.excerpt["id"] for item in scored if item.wrongly_eligible] == []
    assert scoring.macro_f1(scoring.per_class(scored)) >= 0.95
    assert scoring.accuracy(scored) >= 0.95


def test_scoring_counts_right(scoring: ModuleType, tmp_path: Path) -> None:
    """Precision, recall and the forbidden retries, on four excerpts with known answers."""
    excerpts = [
        ("gpu-oom", "fix-config", "CUDA out of memory. Tried to allocate 1 GiB"),
        ("gpu-hardware", "fix-config", "CUDA out of memory. Tried to allocate 2 GiB"),
        ("gpu-hardware", "fix-config", "GPU has fallen off the bus"),
        ("gpu-hardware", "replace-node", "GPU has fallen off the bus"),
    ]
    path = tmp_path / "c.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": f"x-{i}", "label": label, "retry": retry, "text": text}) + "\n"
            for i, (label, retry, text) in enumerate(excerpts)
        )
    )
    scored = scoring.score(path, load_signatures())
    rows = {row.name: row for row in scoring.per_class(scored)}
    assert (rows["gpu-oom"].precision, rows["gpu-oom"].recall) == (0.5, 1.0)
    assert (rows["gpu-hardware"].precision, rows["gpu-hardware"].recall) == (1.0, 2 / 3)
    assert scoring.accuracy(scored) == 0.75
    assert [item.excerpt["id"] for item in scored if item.wrongly_eligible] == ["x-2"]


def test_an_answer_that_is_right_too_counts_and_what_cannot_be_decided_does_not(
    scoring: ModuleType, tmp_path: Path
) -> None:
    oom = "CUDA out of memory. Tried to allocate 1 GiB"
    excerpts: list[dict[str, Any]] = [
        {"label": "cuda-error", "alt": ["gpu-oom"], "text": oom},
        {"label": "cuda-error", "alt": [], "text": oom},
        {"label": "host-oom", "decidable": False, "text": oom},
        {"label": "healthy", "text": "leaked semaphore objects"},  # older than the class benign
        {"label": "healthy", "alt": [], "text": "leaked semaphore objects"},
    ]
    path = tmp_path / "c.jsonl"
    lines = [{"id": f"x-{n}", "retry": "none", **entry} for n, entry in enumerate(excerpts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scored = scoring.score(path, load_signatures())
    assert [item.right for item in scored] == [True, False, True, False]
    assert scoring.calibration(scored) == [(0.9, 2, 0.5), (0.6, 2, 0.5)]


def test_excerpts_of_one_source_are_in_one_part(scoring: ModuleType) -> None:
    parts = [scoring.part_of({"id": str(n), "source": f"o/r#{n % 500}"}) for n in range(1000)]
    assert parts[:500] == parts[500:]
    assert 100 < parts[:500].count("unseen") < 200


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["ranks/{rank}/stderr.log", "rank_{rank}.log"])
def test_the_rank_with_the_cause_is_found_among_victims(
    merging: ModuleType, tmp_path: Path, seed: int, layout: str
) -> None:
    """Also where the excerpt names the rank that it was copied from, and clocks differ."""
    excerpt = {
        "label": "user-error",
        "text": "[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: 'lr'",
    }
    job = merging.make_job(excerpt, 16, 20.0, random.Random(seed))
    rank, found = merging.first_failing(job, tmp_path, layout)
    assert (rank, found) == (job.culprit, "user-error python-exception")
