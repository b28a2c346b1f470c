"""Score the classifier on labelled excerpts, class by class, and say what its confidences mean.

    python scripts/score_classify.py ../shared/corpus/*.jsonl [--misses] [--unseen]

A file holds one JSON object a line with ``id``, ``label``, ``retry``, ``source`` and ``text``, and
perhaps ``decidable`` (false: the class does not follow from the text, and the excerpt is left out)
and ``alt`` (classes that are right too).

The excerpts fall into two parts by a hash of their source, so that two excerpts of one thread are
in the same part: signatures are written with the **seen** part at hand, and the **unseen** part is
only ever scored, with ``--unseen``, when a round of changes is done; its misses are not printed.

Printed are, for each part, precision, recall and F1 of each class, macro F1 over the classes that
occur, accuracy, and each excerpt whose failure was called retry-eligible although its label's
policy is not; then, of the answers given with each confidence, how many were right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ncclops.classify import Report, SignatureSet, classify_bytes, load_signatures
from ncclops.classify.model import BENIGN, ELIGIBLE_POLICIES, NO_FAILURE_SEEN

Part = Literal["seen", "unseen"]
# Of ten sources, how many are never looked at.
_UNSEEN_TENTHS = 3


def part_of(excerpt: dict[str, Any]) -> Part:
    """The part an excerpt belongs to, by its source alone (or its id, where it names none)."""
    source = str(excerpt.get("source") or excerpt["id"])
    number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big")
    return "unseen" if number % 10 < _UNSEEN_TENTHS else "seen"


@dataclass(frozen=True)
class Scored:
    """One excerpt beside its verdict."""

    excerpt: dict[str, Any]
    report: Report

    @property
    def label(self) -> str:
        return str(self.excerpt["label"])

    @property
    def answer(self) -> str:
        """The class given; ``healthy`` is how the labels call a log in which no failure is seen."""
        class_ = self.report.verdict.class_
        return "healthy" if class_ == NO_FAILURE_SEEN else class_

    @property
    def right(self) -> bool:
        # Labels without ``alt`` are older than the class ``benign``.
        default = (BENIGN,) if self.label == "healthy" else ()
        return self.answer in (self.label, *self.excerpt.get("alt", default))

    @property
    def predicted(self) -> str:
        """The class as it is counted: one that is right too counts as the label."""
        return self.label if self.right else self.answer

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
    """Every excerpt of ``path`` whose class follows from its text, with its verdict."""
    return score_excerpts(_decidable(path), signatures)


def score_excerpts(excerpts: Iterable[dict[str, Any]], signatures: SignatureSet) -> list[Scored]:
    return [Scored(item, classify_bytes(item["text"].encode(), signatures)) for item in excerpts]


def _decidable(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and (excerpt := json.loads(line)).get("decidable", True):
            yield excerpt


def per_class(scored: Sequence[Scored]) -> list[ClassScore]:
    """The scores of the classes that occur as labels, by name."""
    labels = Counter(item.label for item in scored)
    predicted = Counter(item.predicted for item in scored)
    right = Counter(item.label for item in scored if item.right)
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
    return sum(item.right for item in scored) / len(scored)


def calibration(scored: Sequence[Scored]) -> list[tuple[float, int, float]]:
    """(confidence, answers given with it, how many of them were right), by falling confidence.

    ``unknown`` is no answer and is left out.
    """
    answers: dict[float, list[bool]] = {}
    for item in scored:
        verdict = item.report.verdict
        if verdict.class_ != "unknown":
            answers.setdefault(round(verdict.confidence, 1), []).append(item.right)
    return [(c, len(right), sum(right) / len(right)) for c, right in sorted(answers.items())[::-1]]


def print_scores(name: str, scored: Sequence[Scored], *, by_class: bool) -> None:
    scores = per_class(scored)
    if by_class:
        print(f"{'class':24} {'n':>4} {'precision':>9} {'recall':>7} {'F1':>6}")
        for row in scores:
            print(
                f"{row.name:24} {row.excerpts:4} {row.precision:9.3f} {row.recall:7.3f}"
                f" {row.f1:6.3f}"
            )
    alarms = sum(item.label == "healthy" and item.report.verdict.names_failure for item in scored)
    wrong = [item for item in scored if item.wrongly_eligible]
    print(
        f"{name}: macro F1 {macro_f1(scores):.3f}  accuracy {accuracy(scored):.3f}"
        f"  n {len(scored)}  false alarms {alarms}  retry-eligible against the label {len(wrong)}"
    )
    for item in wrong:
        verdict = item.report.verdict
        print(f"  {item.excerpt['id']}: {verdict.signature} -> {verdict.retry_policy}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+", help="labelled excerpts, JSON lines")
    parser.add_argument("--misses", action="store_true", help="print wrong verdicts on seen ones")
    parser.add_argument("--unseen", action="store_true", help="score the unseen part too")
    parser.add_argument("--signatures", type=Path, action="append", default=[])
    options = parser.parse_args()
    signatures = load_signatures(*options.signatures)
    parts: tuple[Part, ...] = ("seen", "unseen") if options.unseen else ("seen",)
    all_scored: list[Scored] = []
    for part in parts:
        of_files = [
            score_excerpts((x for x in _decidable(path) if part_of(x) == part), signatures)
            for path in options.paths
        ]
        scored = [item for of_file in of_files for item in of_file]
        all_scored += scored
        print_scores(f"{part}, all", scored, by_class=True)
        for path, of_file in zip(options.paths, of_files, strict=True):
            print_scores(f"{part}, {path.name}", of_file, by_class=False)
        print()
        for item in scored if options.misses and part == "seen" else ():
            if not item.right:
                verdict = item.report.verdict
                print(
                    f"  {item.excerpt['id']}: {item.label} -> {item.answer} ({verdict.signature})"
                )
    print(f"{'confidence':>10} {'answers':>8} {'right':>6}")
    for confidence, answers, share in calibration(all_scored):
        print(f"{confidence:10.1f} {answers:8} {share:6.2f}")


if __name__ == "__main__":
    main()
