"""The scores on labelled excerpts of real logs, where those are present."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ncclops.classify import load_signatures

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT.parent / "shared" / "corpus" / "dev.jsonl"


@pytest.fixture(scope="module")
def scoring() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "score_classify", ROOT / "scripts" / "score_classify.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


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
