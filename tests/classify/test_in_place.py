"""What a worker asks of an exception, between a fault and its restart."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ncclops.classify import classify_bytes, in_place, load_signatures
from tests.conftest import clean_environ

DATA = in_place.data()
CORRUPTED, FAILED_START = DATA["corrupted-context"], DATA["failed-start"]


@pytest.mark.parametrize("example", CORRUPTED["examples"])
def test_a_corrupted_context_is_found_in_every_example(example: str) -> None:
    what = in_place.corrupted_context(example)
    assert what in CORRUPTED["words"] + CORRUPTED["codes"]
    assert in_place.corrupted_context(f"before\n{example}\nafter") == what


@pytest.mark.parametrize("code", CORRUPTED["codes"])
def test_a_code_stands_for_itself(code: str) -> None:
    assert in_place.corrupted_context(f"RuntimeError: failed: {code}") == code
    assert in_place.corrupted_context(f"RuntimeError: failed: {code}OfAnotherKind") is None


@pytest.mark.parametrize("words", CORRUPTED["words"])
def test_words_count_only_shortly_after_cuda(words: str) -> None:
    assert in_place.corrupted_context(f"CUDA error: {words}") == words
    assert in_place.corrupted_context(f"ValueError: {words}") is None
    assert in_place.corrupted_context(f"CUDA {'.' * 300} {words}") is None


@pytest.mark.parametrize("text", [*CORRUPTED["near_misses"], *FAILED_START["examples"]])
def test_other_errors_leave_the_context_usable(text: str) -> None:
    assert in_place.corrupted_context(text) is None


def test_a_communicator_that_did_not_come_up_is_told_from_other_errors() -> None:
    assert all(map(in_place.is_failed_start, FAILED_START["examples"]))
    assert not any(map(in_place.is_failed_start, FAILED_START["near_misses"]))


@pytest.mark.parametrize("example", [*CORRUPTED["examples"], *FAILED_START["examples"]])
def test_the_signatures_know_these_failures_too(example: str) -> None:
    """What the workers leave for is explained at the end of the run."""
    assert load_signatures().match_line(" ".join(example.split())), example
    verdict = classify_bytes(example.encode()).verdict
    expected = ("cuda-error", "gpu-hardware") if example in CORRUPTED["examples"] else None
    assert expected is None or verdict.class_ in expected


@pytest.mark.slow
def test_a_worker_reads_no_signatures() -> None:
    program = (
        "import sys, ncclops.worker.escalation\n"
        "assert not [name for name in sys.modules if name.startswith('ncclops.classify')]\n"
        "from ncclops.classify import in_place\n"
        "assert in_place.corrupted_context('CUDA error: device-side assert triggered')\n"
        "print(*[name for name in sys.modules if name.startswith('ncclops.classify')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environ(), capture_output=True, text=True
    )
    assert done.stdout.split() == ["ncclops.classify", "ncclops.classify.in_place"], done.stderr
