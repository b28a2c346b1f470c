"""What the words of a failure that no signature knows say of its class."""

from __future__ import annotations

import pytest

from ncclops.classify import Report, Scanner, classify_bytes
from ncclops.classify.last_words import BY_WORDS, likelihoods, words_of
from ncclops.classify.model import CLASSES
from tests.classify.shipped import LOADED

STARTS = "gangway: 8 crews are here\ngangway: crew 3 takes its place\n"


def classify(text: str) -> Report:
    return classify_bytes(text.encode(), LOADED)


@pytest.mark.parametrize(
    ("line", "class_"),
    [
        ("E0102 10:00:00 77 gangway.cc:7] the crew exits with exception", "peer-exit"),
        ("gangway ERROR the manifest: no such file or directory", "user-error"),
    ],
)
def test_a_line_that_no_signature_knows_has_the_class_of_its_words(line: str, class_: str) -> None:
    report = classify(f"{STARTS}{line}\ngangway: all crews go home\n")
    verdict = report.verdict
    assert (verdict.class_, verdict.signature) == (class_, None)
    assert not verdict.eligible and verdict.retry_policy == "none"
    assert 0.5 < verdict.confidence < 0.75 and "by its words (" in verdict.summary
    (evidence,) = report.evidence
    assert (evidence.line, evidence.signature) == (3, BY_WORDS)
    assert line.endswith(evidence.text)


@pytest.mark.parametrize(
    "line",
    [
        "gangway: crew 3 was signaled with signal 4",  # says not that it failed
        "WARNING: crew 3 exits with exception",
        "gangway INFO no such file or directory, making it",
        "if a crew died with signal 4, the others go on",
        "gangway: error: crew 3 is not there, trying again",
        "gangway ERROR: could not remove the manifest: no such file or directory",
        "gangway ERROR: zzyzx plugh",  # no word that is known
    ],
)
def test_other_lines_stay_unknown(line: str) -> None:
    report = classify(f"{STARTS}{line}\n")
    assert report.verdict.class_ == "unknown"
    assert len(report.candidates) == 3 and report.evidence == ()


@pytest.mark.parametrize(
    "text",
    [
        "INFO 07-03 10:00:00 gangway.py:7] 8 crews are aboard\n",
        "[10:00:00] [WARNING] gangway: no date\nI0102 10:00:00 7 gangway.cc:7] off\n",
        "saving checkpoint at iteration 100 to /ckpt\n",
        "Normal  Scheduled  5m  default-scheduler  Successfully assigned gangway-0 to n1\n",
        "monitor: GPU relative performance:\n  Rank=0 Node=n1 Score=0.95\n",
        "=> creating model 'gangway50'\n",
        "| N/A   33C    P0    55W / 300W |     35MiB / 81920MiB |      0%      Default |\n",
        "196,220,948 total parameters\n",
    ],
)
def test_programs_that_tell_what_they_do_and_of_no_failure_are_at_work(text: str) -> None:
    verdict = classify(text).verdict
    assert (verdict.class_, verdict.signature, verdict.confidence) == ("no-failure-seen", None, 0.6)
    assert verdict.retry_policy == "none" and "no line says that it failed" in verdict.summary


@pytest.mark.parametrize(
    "line",
    [
        "gangway ERROR: zzyzx plugh",
        "[WARNING] gangway: the crew failed with code 3",  # a warning may say anything
        "gangway INFO the lock is stuck",
        "WARNING: the hull is damaged",
        "gangway WARN the crew of 3 is evicted",
        "n1:1:2 [0] zzyzx.cc:7 NCCL WARN zzyzx plugh",  # how NCCL says what failed
        "n1:1:2 [0] zzyzx.cu:7 WARN zzyzx plugh",  # the same in NCCL 2.3
    ],
)
def test_a_line_of_trouble_among_information_is_not_at_work(line: str) -> None:
    verdict = classify(f"INFO 07-03 10:00:00 gangway.py:7] 8 crews are aboard\n{line}\n").verdict
    assert verdict.class_ != "no-failure-seen"


def test_the_line_of_several_logs_keeps_its_log_and_rank() -> None:
    scanner = Scanner(LOADED)
    scanner.feed(0, "ranks/0/stderr.log", STARTS)
    failure = "gangway ERROR the manifest: no such file or directory"
    scanner.feed(3, "ranks/3/stderr.log", f"{STARTS}{failure}")  # has no end yet
    report = scanner.verdict()
    (evidence,) = report.evidence
    assert (evidence.file, evidence.line, evidence.rank) == ("ranks/3/stderr.log", 3, 3)
    assert report.verdict.rank == 3 and not report.verdict.rank_began_it
    scanner.feed(3, "ranks/3/stderr.log", "\nstep 1 loss 2.0\nstep 2 loss 1.9\n")
    assert scanner.verdict().verdict.class_ == "no-failure-seen"


def test_likelihoods_are_of_the_classes_and_sum_to_one() -> None:
    chances = likelihoods(words_of("signal 11: segmentation fault (core dumped)"))
    assert set(chances) - set(CLASSES) == {"harmless"}
    assert sum(chances.values()) == pytest.approx(1.0)
    assert max(chances, key=chances.__getitem__) == "process-crash"


@pytest.mark.parametrize(
    ("line", "class_"),
    [
        ("RuntimeError: ACL stream synchronize failed, error code:507018", "cuda-error"),
        ("RuntimeError: gather isn't implemented on backend [xpu]", "coalesced-unsupported"),
        # The name says that the script has made a mistake.
        ("TypeError: ACL stream synchronize failed, error code:507018", "user-error"),
        ("RuntimeError: the size of tensor a must match the size of tensor b", "user-error"),
    ],
)
def test_an_exception_has_the_class_of_its_words_where_they_leave_no_doubt(
    line: str, class_: str
) -> None:
    report = classify(f"[rank3]: Traceback (most recent call last):\n[rank3]: {line}\n")
    verdict = report.verdict
    assert verdict.class_ == class_ and not verdict.eligible
    assert verdict.rank == 3
    assert report.evidence[0].text.endswith(line)
    assert (verdict.signature is None) == (class_ != "user-error")


def test_the_kind_of_process_that_ray_names_is_no_topic() -> None:
    line = "the request cmpl-7 has failed"
    assert classify(f"worker 3: {line}").verdict.class_ == "peer-exit"
    assert classify(f"(Worker pid=77) ERROR 01-02 10:00:00 [x.py:7] {line}").verdict.class_ != (
        "peer-exit"
    )
