"""Learn what words of a failing line say about its class: ``src/ncclops/classify/words.json``.

    python scripts/word_weights.py [--output FILE]

Learned from are the examples of all shipped signatures, lines that read like a failure and are
none (examples of harmless ones, and near misses that no signature takes for a failure), and the
phrases of ``word_weights.toml``. No log is. The model is a softmax over the rarity of words,
with a penalty on large weights; its result is the same each time. Run it again when many
signatures were added: a model that does not know the newest ones is no worse for the others.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np

from ncclops.classify import classify_bytes
from ncclops.classify.last_words import HARMLESS, words_of
from ncclops.classify.loader import load_signatures

_PENALTY, _ROUNDS, _STEP = 0.1, 1500, 1.0
# Smaller weights, in hundredths, say nothing.
_LEAST = 25
_WEIGHTS = Path(__file__).parents[1] / "src/ncclops/classify/words.json"
_PHRASES = Path(__file__).with_suffix(".toml")


def lessons() -> list[tuple[str, str]]:
    """(class, line) of all that is learned from."""
    signatures = load_signatures()
    rows = []
    for signature in signatures.signatures:
        if signature.id.startswith(("context-", "ncclops-")):
            continue
        class_ = HARMLESS if signature.role == "benign" else signature.class_
        rows += [(class_, example) for example in signature.examples]
        rows += [
            (HARMLESS, line)
            for line in signature.near_misses
            if not classify_bytes(line.encode(), signatures).verdict.names_failure
        ]
    phrases = tomllib.loads(_PHRASES.read_text("utf-8"))["phrases"]
    rows += [(class_, phrase) for class_, found in phrases.items() for phrase in found]
    return rows


def learn(rows: list[tuple[str, str]]) -> dict[str, object]:
    """The document that `ncclops.classify.last_words` reads."""
    bags = [words_of(line) for _, line in rows]
    frequency = Counter(word for bag in bags for word in bag)
    words = sorted(frequency)
    column = {word: number for number, word in enumerate(words)}
    rarity = np.log((1 + len(rows)) / (1 + np.array([frequency[w] for w in words]))) + 1
    rarity = np.round(rarity, 2)
    features = np.zeros((len(rows), len(words)))
    for number, bag in enumerate(bags):
        columns = [column[word] for word in bag]
        features[number, columns] = rarity[columns]
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-9)

    classes = sorted({class_ for class_, _ in rows})
    labels = np.array([classes.index(class_) for class_, _ in rows])
    counts = np.bincount(labels)
    # Each class counts alike, however many examples it has.
    share = (len(rows) / len(classes) / counts)[labels]
    weights, intercepts = _softmax(features, labels, share, len(classes))

    # A constant for all classes changes no likelihood: most weights are then close to none.
    weights -= np.median(weights, axis=1, keepdims=True)
    hundredths = np.round(weights * 100).astype(int)
    table = {
        word: [
            round(rarity[number] * 100),
            *(
                value
                for place in range(len(classes))
                if abs(weight := int(hundredths[number, place])) >= _LEAST
                for value in (place, weight)
            ),
        ]
        for number, word in enumerate(words)
    }
    return {
        "intercepts": {
            name: round(float(b), 3) for name, b in zip(classes, intercepts, strict=True)
        },
        "words": {word: row for word, row in table.items() if len(row) > 1},
    }


def _softmax(
    features: np.ndarray, labels: np.ndarray, share: np.ndarray, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and intercepts with the least loss, by gradient descent with momentum."""
    rows, columns = features.shape
    weights, intercepts = np.zeros((columns, classes)), np.zeros(classes)
    pace, pace_b = np.zeros_like(weights), np.zeros_like(intercepts)
    target = np.eye(classes)[labels]
    for _ in range(_ROUNDS):
        scores = features @ weights + intercepts
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = (odds / odds.sum(axis=1, keepdims=True) - target) * share[:, None]
        pace = 0.9 * pace - _STEP * (features.T @ error + _PENALTY * weights) / 10
        pace_b = 0.9 * pace_b - _STEP * error.sum(axis=0) / rows
        weights, intercepts = weights + pace, intercepts + pace_b
    return weights, intercepts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=_WEIGHTS)
    options = parser.parse_args()
    document = learn(lessons())
    # A word on each line, so that a comparison of two versions shows what changed.
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).replace("],", "],\n")
    options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
