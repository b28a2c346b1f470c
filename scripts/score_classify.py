"""Score the classifier on a file of labelled excerpts, class by class.

    python scripts/score_classify.py ../shared/corpus/dev.jsonl [--misses] [--signatures DIR]

The file holds one JSON object a line with ``id``, ``label``, ``retry`` and ``text``. Printed
are precision, recall and F1 of each class, macro F1 over the classes that occur, accuracy, and
each excerpt whose failure was called retry-eligible although its label's policy is not.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.classify import Report, SignatureSet, classify_bytes, load_signatures
from ncclops.classify.model import ELIGIBLE_POLICIES


@dataclass(frozen=True)
class Scored:
    """One excerpt beside its verdict."""

    excerpt: dict[str, Any]
    report: Report

    @property
    def label(self) -> str:
        return str(self.excerpt["label"])

    @property
    def predicted(self) -> str:
        """The class; ``healthy`` is how the labels call a log in which no failure is seen."""
        verdict = self.report.verdict
        return verdict.class_ if verdict.shows_failure else "healthy"

    @property
    def wrongly_eligible(self) -> bool:
        return self.report.verdict.eligible and self.excerpt["retry"] not in ELIGIBLE_POLICIES


@dataclass(frozen=True)
class ClassScore:
    """How one class fared; a ratio without a denominator is 0."""

    name: str
    excerpts: int
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def score(path: Path, signatures: SignatureSet) -> list[Scored]:
    """Every excerpt of ``path`` with its verdict."""
    lines = path.read_text(encoding="utf-8").splitlines()
    excerpts = [json.loads(line) for line in lines if line.strip()]
    return [Scored(item, classify_bytes(item["text"].encode(), signatures)) for item in excerpts]


def per_class(scored: Sequence[Scored]) -> list[ClassScore]:
    """The scores of the classes that occur as labels, by name."""
    labels = Counter(item.label for item in scored)
    predicted = Counter(item.predicted for item in scored)
    right = Counter(item.label for item in scored if item.label == item.predicted)
    return [
        ClassScore(
            name, count, right[name] / predicted[name] if predicted[name] else 0.0,
            right[name] / count,
        )
        for name, count in sorted(labels.items())
    ]  # fmt: skip


def macro_f1(scores: Iterable[ClassScore]) -> float:
    values = [item.f1 for item in scores]
    return sum(values) / len(values)


def accuracy(scored: Sequence[Scored]) -> float:
    return sum(item.label == item.predicted for item in scored) / len(scored)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="the labelled excerpts, JSON lines")
    parser.add_argument("--misses", action="store_true", help="print each wrong verdict")
    parser.add_argument("--signatures", type=Path, action="append", default=[])
    options = parser.parse_args()
    scored = score(options.path, load_signatures(*options.signatures))
    scores = per_class(scored)
    print(f"{'class':24} {'n':>4} {'precision':>9} {'recall':>7} {'F1':>6}")
    for row in scores:
        print(
            f"{row.name:24} {row.excerpts:4} {row.precision:9.3f} {row.recall:7.3f} {row.f1:6.3f}"
        )
    print(f"\nmacro F1 {macro_f1(scores):.3f}  accuracy {accuracy(scored):.3f}  n {len(scored)}")
    wrong = [item for item in scored if item.wrongly_eligible]
    print(f"retry-eligible against the label: {len(wrong)}")
    for item in wrong:
        verdict = item.report.verdict
        print(f"  {item.excerpt['id']}: {verdict.signature} -> {verdict.retry_policy}")
    for item in scored if options.misses else ():
        if item.label != item.predicted:
            verdict = item.report.verdict
            print(f"  {item.excerpt['id']}: {item.label} -> {item.predicted} ({verdict.signature})")


if __name__ == "__main__":
    main()
