"""What a worker asks of an exception, between a fault and its restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from ncclops.classify import classify_bytes, in_place
from ncclops.classify.loader import shipped_signatures
from tests.conftest import clean_environ

DATA = in_place.data()
CORRUPTED, FAILED_START = DATA["corrupted-context"], DATA["failed-start"]
FINAL = DATA["final"]


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
    assert shipped_signatures().match_line(" ".join(example.split())), example
    verdict = classify_bytes(example.encode()).verdict
    expected = ("cuda-error", "gpu-hardware") if example in CORRUPTED["examples"] else None
    assert expected is None or verdict.class_ in expected


@pytest.mark.parametrize("example", FINAL["examples"])
def test_an_error_that_comes_back_with_every_start_is_final(example: str) -> None:
    found = in_place.judge(example)
    assert found.is_final
    assert not found.is_script_s
    assert found.proof in example


@pytest.mark.parametrize(
    "text",
    [
        *FINAL["near_misses"],
        *FAILED_START["examples"],
        *FAILED_START["near_misses"][1:],
        *CORRUPTED["examples"],
    ],
)
def test_what_may_pass_is_not_final(text: str) -> None:
    assert not in_place.judge(text).is_final


def test_the_names_of_the_table_exist_and_say_something() -> None:
    by_id = shipped_signatures().by_id
    for name in FINAL["signatures_that_may_pass"]:
        assert by_id[name].class_ in FINAL["classes"]
        assert by_id[name].retry in ("fix-config", "fix-code")
    for name in in_place.data()["script"]["signatures"]:
        assert by_id[name].retry == "fix-code"


@pytest.mark.parametrize(
    ("text", "is_script_s"),
    [
        ("AssertionError: the loss is not a number", True),
        ("KeyError: 'learning_rate'", True),
        ("mine.Broken: no words that anybody knows", True),
        (
            "ValueError: Default process group has not been initialized, please make sure to call"
            " init_process_group.",
            True,
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        (FAILED_START["examples"][0], False),
        ("RuntimeError: cannot read data/\udcff.bin: a name that is no UTF-8", True),
    ],
)
def test_an_exception_is_the_script_s_unless_a_signature_knows_better(
    text: str, *, is_script_s: bool
) -> None:
    assert in_place.judge(text).is_script_s == is_script_s


QUOTED = """Traceback (most recent call last):
  File "/w/train.py", line 12, in <module>
    step()  # not with Backend nccl does not support allgather_into_tensor_coalesced
    ^^^^^^
  File "/w/train.py", line 5, in step
    raise ValueError("broken")
ValueError: broken"""


def test_what_a_traceback_quotes_of_the_script_is_no_error() -> None:
    assert not in_place.judge(QUOTED).is_final
    assert in_place.judge(QUOTED.replace("ValueError: broken", FINAL["examples"][0])).is_final


def test_what_was_printed_before_explains_an_error() -> None:
    error = "RuntimeError: NCCL error in: x.cpp:9, internal error - please report this issue"
    warning = "n1:4:4 [0] NCCL WARN Failed to initialize any NET plugin"
    assert not in_place.judge(error).is_final
    found = in_place.judge(error, f"before\n{warning}\n")
    assert found.is_final
    assert found.proof == warning


@pytest.mark.slow
def test_a_worker_reads_no_signatures_before_it_has_to() -> None:
    program = (
        "import sys, ncclops.worker.escalation\n"
        "from ncclops.classify import in_place\n"
        "assert in_place.corrupted_context('CUDA error: device-side assert triggered')\n"
        "print(*[name for name in sys.modules if name.startswith('ncclops.classify')])\n"
        "in_place.prepare()\n"
        "before = set(sys.modules)\n"
        "assert in_place.judge('KeyError: 1').is_script_s\n"
        "assert before == set(sys.modules), set(sys.modules) - before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environ(), capture_output=True, text=True
    )
    assert done.stdout.split() == ["ncclops.classify", "ncclops.classify.in_place"], done.stderr
    assert done.returncode == 0, done.stderr


def test_the_signatures_of_a_site_count_in_a_worker_as_they_do_in_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks took what the site says of a failure for one of the script's, and ended the job."""
    error = "OSError: [Errno 5] Input/output error: '/data/shard-1.tar'"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    try:
        in_place._signatures.cache_clear()
        assert in_place.judge(error).is_script_s
        directory = tmp_path / "ncclops/signatures"
        directory.mkdir(parents=True)
        (directory / "data.toml").write_text(
            dedent(f"""\
            [[signature]]
            id = "data-server"
            class = "network-transport"
            role = "cause"
            literals = ["/data/shard"]
            retry = "retry-after-cooldown"
            summary = "the data server does not answer"
            remedy = ["tell its owners"]
            examples = ["{error}"]
            near_misses = ["/data"]
            """)
        )
        in_place._signatures.cache_clear()
        assert in_place.judge(error).summary == "the data server does not answer"
        assert not in_place.judge(error).is_script_s
    finally:
        in_place._signatures.cache_clear()
