"""What real streams do to lines: cuts, colours, progress bars, other encodings, endless lines."""

from __future__ import annotations

import random
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.classify import Report, Scanner, SignatureSet, classify_bytes
from ncclops.classify.matcher import build_matcher, plain_matcher, stdlib_matcher
from tests.classify.shipped import LOADED

CAUSE = b"[rank3]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
FILLER = b"step %d loss 1.25 tokens/s 1200\n"


def scan(data: bytes, cut: int = 1 << 18) -> Report:
    scanner = Scanner(LOADED)
    for start in range(0, len(data), cut):
        scanner.feed(None, "log", data[start : start + cut])
    return scanner.verdict()


def assert_found(report: Report, line: int) -> None:
    verdict = report.verdict
    assert (verdict.class_, verdict.rank) == ("cuda-error", 3)
    assert report.evidence[0].line == line


@pytest.mark.parametrize("cut", [1, 7, 64, 1000, 1 << 18])
def test_lines_are_found_however_the_stream_is_cut(cut: int) -> None:
    data = b"".join(FILLER % i for i in range(20)) + CAUSE + b"\n" + FILLER % 21
    assert_found(scan(data, cut), 21)


NOT_MADE = (
    b"DistBackendError: NCCL error in: /src/c10d/NCCLUtils.cpp:77, internal error - please report"
    b" this issue to the NCCL developers, NCCL version 2.32.3\nncclInternalError: Internal check"
    b" failed.\nLast error:\n"
)


@pytest.mark.parametrize("cut", [1, 7, 64, 1 << 18])
@pytest.mark.parametrize(
    ("message", "policy"),
    [
        (b"the widget table has no room for rank 9", "fix-config"),
        (b"[Proxy Service] the widget table has no room", "fix-config"),
        (b"", "retry-once-lazy"),
        (b"Exception raised from create at /src/c10d/NCCLUtils.cpp:77", "retry-once-lazy"),
        (b"[rank0]:[W102 10:00:00.1 x.cpp:7] Warning: not destroyed", "retry-once-lazy"),
    ],
)
def test_a_reason_of_nccl_s_that_nothing_knows_is_no_reason_to_try_again(
    cut: int, message: bytes, policy: str
) -> None:
    report = scan(NOT_MADE + message + b"\nTraceback (most recent call last):\n", cut)
    assert (report.verdict.class_, report.verdict.retry_policy) == ("bootstrap", policy)
    if policy == "fix-config":
        assert (report.evidence[0].line, report.evidence[0].text) == (4, message.decode())


def test_the_class_of_a_reason_is_that_of_the_plugin_that_wrote_it() -> None:
    verdict = scan(NOT_MADE + b"NET/OFI widget 9 of the table is a duplicate\n").verdict
    assert (verdict.class_, verdict.retry_policy) == ("network-transport", "fix-config")


@pytest.mark.parametrize(
    ("message", "policy"),
    [
        (b"the widget table has no room", "fix-config"),
        (b"widget: the peer left", "retry-once-lazy"),
    ],
)
def test_of_a_remote_error_only_a_lost_connection_is_tried_again(
    message: bytes, policy: str
) -> None:
    remote = NOT_MADE.replace(b"internal error", b"remote process exited").replace(
        b"ncclInternalError: Internal check", b"ncclRemoteError: A call"
    )
    verdict = scan(remote + message + b"\n").verdict
    assert (verdict.class_, verdict.retry_policy) == ("bootstrap", policy)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_line_ends(end: bytes) -> None:
    data = b"a" + (end or b"\n") + b"b" + (end or b"\n") + CAUSE + end
    report = scan(data)
    assert_found(report, 3)
    assert report.evidence[0].text == CAUSE.decode()


def test_a_line_without_its_end_is_read_and_not_counted_twice() -> None:
    scanner = Scanner(LOADED)
    scanner.feed(3, "stdout", b"one\n" + CAUSE[:20])
    assert scanner.verdict().verdict.class_ != "cuda-error"
    scanner.feed(3, "stdout", CAUSE[20:])
    first = scanner.verdict()
    assert_found(first, 2)
    scanner.feed(3, "stdout", b"\n")
    again = scanner.verdict()
    assert_found(again, 2)
    assert len(again.evidence) == len(first.evidence)


def test_asking_often_does_not_count_an_unfinished_step_often() -> None:
    """A run of steps clears a failure; one unfinished step asked about twenty times is no run."""
    scanner = Scanner(LOADED)
    scanner.feed(None, "log", CAUSE + b"\nstep 7 loss 2.0")
    verdicts = {scanner.verdict().verdict.class_ for _ in range(20)}
    assert verdicts == {"cuda-error"}


def test_colours_do_not_hide_a_message() -> None:
    coloured = CAUSE.replace(b"CUDA error", b"\x1b[1;31mCUDA\x1b[0m error").replace(
        b"illegal", b"\x1b[33millegal\x1b[0m"
    )
    report = scan(b"x\n" + coloured + b"\n")
    assert_found(report, 2)
    assert "\x1b" not in report.evidence[0].text


def test_a_progress_bar_is_one_line_and_its_states_are_not_evidence() -> None:
    bar = b"".join(
        b"Epoch 1: %d%%|###| %d/100 [00:01<00:09, 9.1it/s]\r" % (i, i) for i in range(99)
    )
    report = scan(b"start\n" + bar + CAUSE + b"\nend\n")
    assert_found(report, 2)
    assert report.evidence[0].text == CAUSE.decode()


def test_a_bar_that_never_ends_its_line_stays_in_bounds() -> None:
    scanner = Scanner(LOADED)
    for i in range(40_000):
        scanner.feed(
            None, "log", b"Epoch 1: 5%%|###| %d/9 [00:01<00:09, 9.1it/s]%s\r" % (i, b"." * 60)
        )
    scanner.feed(None, "log", CAUSE + b"\r")
    assert_found(scanner.verdict(), 1)


def test_invalid_utf8_and_nul_bytes_are_read_over() -> None:
    report = scan(b"\xff\xfe\x00\x80 garbage\n\xc3( " + CAUSE + b" \xff\n")
    assert_found(report, 2)


@pytest.mark.parametrize("where", [0, 500_000, 1_048_500, 1_500_000, 2_900_000])
def test_a_line_of_megabytes(where: int) -> None:
    line = bytearray(b"x" * 3_000_000)
    line[where : where + len(CAUSE) + 2] = b" " + CAUSE + b" "
    report = scan(b"first\n" + bytes(line) + b"\nlast\n")
    assert report.verdict.class_ == "cuda-error"
    assert report.evidence[0].line == 2
    assert "illegal memory access" in report.evidence[0].text
    assert len(report.evidence[0].text) < 1000
    assert report.stats.lines == 3


@pytest.mark.slow  # takes seconds
def test_memory_does_not_grow_with_the_log() -> None:
    """Twenty thousand echoes of 64 ranks keep no more hits than two thousand."""

    def held(echoes: int) -> int:
        scanner = Scanner(LOADED)
        tracemalloc.start()
        echo = b"[rank%d]: ncclRemoteError: A call failed %d\n"
        for start in range(0, echoes, 100):
            scanner.feed(
                None, "log", b"".join(echo % (i % 64, i) for i in range(start, start + 100))
            )
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size

    held(100)  # compiled patterns and other one-time costs
    small, large = held(2_000), held(20_000)
    assert large < small + 100_000


def test_a_repeated_line_keeps_its_first_and_its_last_place() -> None:
    lines = [b"ncclRemoteError: A call failed\n"] * 100
    report = scan(b"".join(lines))
    assert [item.line for item in report.evidence] == [1, 2, 100]


def test_stats_count_what_was_read() -> None:
    data = b"a\nb\nc"
    stats = scan(data).stats
    assert (stats.files, stats.lines, stats.bytes) == (1, 3, 5)


LITERALS = [b"abc", b"abcd", b"bcd", b"c", b"aa", b"ncclRemoteError", b"Error"]


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"\n", b"Error", b"ncclRemote"])))
def test_all_matchers_agree(pieces: list[bytes]) -> None:
    block = b"".join(pieces)
    find = build_matcher(LITERALS)
    few = find(block)
    assert find(b" " * (1 << 20)) == []  # from here on hyperscan
    fast = find(block)
    for other in (few, plain_matcher(LITERALS)(block), stdlib_matcher(LITERALS)(block)):
        assert sorted(set(fast)) == sorted(set(other))
    naive = {
        (end + len(literal), index)
        for index, literal in enumerate(LITERALS)
        for end in range(len(block))
        if block[end : end + len(literal)] == literal
    }
    assert set(fast) == naive


def test_without_hyperscan_the_answers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hyperscan", None)
    slow = SignatureSet(LOADED.signatures)
    data = "\n".join(s.examples[0] for s in LOADED.signatures).encode()
    assert classify_bytes(data, slow).evidence == classify_bytes(data, LOADED).evidence


def test_a_matcher_without_literals_finds_nothing() -> None:
    assert build_matcher([])(b"anything") == []


def test_the_verdict_does_not_depend_on_the_cuts() -> None:
    """A log fed in random pieces gives the report of the same log in one piece."""
    rng = random.Random(7)
    lines = [s.examples[0].encode() for s in LOADED.signatures]
    rng.shuffle(lines)
    data = b"\n".join(lines)
    whole = classify_bytes(data, LOADED)
    for _ in range(5):
        scanner, position = Scanner(LOADED), 0
        while position < len(data):
            size = rng.randint(1, 400)
            scanner.feed(None, "<memory>", data[position : position + size])
            position += size
        report = scanner.verdict()
        assert report.verdict == whole.verdict
        assert report.evidence == whole.evidence


@pytest.mark.parametrize(
    ("lines", "class_"),
    [
        # The message names what failed: on its own line the exception is that, and no script's.
        (["RuntimeError: NVLink error on GPU 3: link 4 is broken"], "gpu-hardware"),
        # It explains its own line only: an exception of another line keeps its place.
        (["KeyError: 'labels'", "RuntimeError: NVLink error on GPU 3: link 4"], "user-error"),
        # A line of failure that no signature knows, by what it speaks of.
        (["health: NVSwitch 3 has failed"], "gpu-hardware"),
        (["ERROR: could not reach the coordinator at 10.0.0.1:1234"], "store-rendezvous"),
        # It stands behind a line that names its cause, wherever that is.
        (["health: NVSwitch 3 has failed", CAUSE.decode()], "cuda-error"),
        # NCCL's code 6 is an error of the other end.
        (
            [
                "n1:1:2 [1] proxy.cc:1119 NCCL WARN [Proxy Service 9] Failed to execute operation "
                "Connect from rank 9, retcode 6"
            ],
            "peer-exit",
        ),
    ],
)
def test_a_line_is_of_what_it_speaks_of(lines: list[str], class_: str) -> None:
    verdict = classify_bytes("\n".join([*lines, ""]).encode(), LOADED).verdict
    assert verdict.class_ == class_
    assert not (verdict.retry_policy or "none").startswith("retry")


@pytest.mark.parametrize(
    "line",
    [
        "INFO NVLink error counters: 0",
        "WARNING: RDMA is not there, falling back to TCP",
        "if the NIC failed, replace it",
        "8 workers, 0 failed",
        "NET/IB: the adapter's firmware doesn't support error injection",
        'INFO:     10.0.0.9:5000 - "POST /v1/completions HTTP/1.1" 200 OK',
    ],
)
@pytest.mark.parametrize("around", [[], ["step 1 loss 2.1 tok/s 100", "step 2 loss 2.0 tok/s 99"]])
def test_a_line_without_a_failure_names_none(line: str, around: list[str]) -> None:
    data = "\n".join([*around[:1], line, *around[1:], ""]).encode()
    assert not classify_bytes(data, LOADED).verdict.names_failure


@pytest.mark.parametrize(
    ("prefix", "class_"),
    [
        ("2026-07-01 10:00:00,123 - engine - WARNING - ", "unknown"),
        ("(EngineCore pid=7) INFO 05-20 20:36:19 [engine.py:12] ", "unknown"),
        ("2026-07-01 10:00:00,123 - engine - ERROR - ", "gpu-hardware"),
        ("(EngineCore pid=7) ERROR 05-20 20:36:19 [engine.py:12] ", "gpu-hardware"),
    ],
)
def test_what_a_logger_calls_information_or_a_warning_is_no_failure(
    prefix: str, class_: str
) -> None:
    """The level stands in what launchers and loggers put before a line."""
    line = f"{prefix}NVLink setup between GPU 0 and GPU 1 failed with code 3"
    assert classify_bytes(line.encode(), LOADED).verdict.class_ == class_


@pytest.mark.parametrize(
    ("text", "class_"),
    [
        ("NCCL WARN words of a later version\nn1:2:3 [0] NCCL INFO graph/topo.cc:4 -> 3\n",
         "bootstrap"),
        ("NCCL WARN words of a later version\nn1:2:3 [0] NCCL INFO transport/net.cc:4 -> 6\n",
         "network-transport"),
        ("NCCL WARN words of a later version\nn1:2:3 [0] NCCL INFO init.cc:4 -> 5\n",
         "invalid-usage"),
        ("NCCL WARN words of a later version\nn1:2:3 [0] NCCL INFO graph/topo.cc:4 -> 3\n"
         "n1:2:3 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 - Init COMPLETE\n",
         "unknown"),
    ],
)  # fmt: skip
def test_where_no_words_are_known_the_source_file_of_the_trace_decides(
    text: str, class_: str
) -> None:
    assert classify_bytes(f"n1:2:3 [0] {text}".encode(), LOADED).verdict.class_ == class_


def test_a_lost_connection_is_the_store_s_only_where_the_ranks_were_meeting() -> None:
    lost = b"RuntimeError: Connection reset by peer\n"
    frame = (
        b'  File "/opt/torch/distributed/distributed_c10d.py", line 360, in init_process_group\n'
    )
    assert classify_bytes(lost, LOADED).verdict.class_ == "peer-exit"
    assert classify_bytes(frame + lost, LOADED).verdict.class_ == "store-rendezvous"


def test_an_exception_of_those_who_waited_for_a_dead_worker_is_an_echo() -> None:
    died = b"ERROR [multiproc_executor.py:273] Worker proc VllmWorker-0 died unexpectedly\n"
    raised = b'    raise ConfigurationError("cancelled")\n'
    assert classify_bytes(raised, LOADED).verdict.class_ == "user-error"
    assert classify_bytes(died + raised, LOADED).verdict.class_ == "peer-exit"


IGNORED = (
    b"step 1 loss 2\n"
    b"%sException ignored in: <function Loader.__del__ at 0x7f>\n"
    b"%sTraceback (most recent call last):\n"
    b'%s  File "/w/t.py", line 9, in __del__\n'
    b"%s    raise ValueError(self.file)\n"
)


@pytest.mark.parametrize("cut", [1, 1 << 18])
@pytest.mark.parametrize("prefix", [b"", b"[rank1]: ", b"3: "])
def test_an_exception_that_python_ignored_ended_nothing(prefix: bytes, cut: int) -> None:
    """One of a destructor, as a rule: what ended the program came after it, if it ended."""
    ignored = IGNORED.replace(b"%s", prefix)
    its_last = prefix + b"ValueError: train.bin\n"
    assert scan(ignored + its_last, cut).verdict.class_ != "user-error"
    raised = its_last + b"Traceback (most recent call last):\nKeyError: 'lr'\n"
    report = scan(ignored + raised, cut)
    assert (report.verdict.class_, report.evidence[0].line) == ("user-error", 8)
    assert len([each for each in report.evidence if each.line < 7]) == 0
    assert_found(scan(ignored + CAUSE + b"\n", cut), 6)


def test_threads_that_search_at_the_same_time_do_not_meet() -> None:
    """As the reader of a run's logs and the judgement of its end do, with the same signatures."""
    find = build_matcher([b"first words", b"other words"])
    blocks = [b"first words, " + b"x" * 200_000, b"x" * 200_000 + b"other words"]
    wanted = [[(len(b"first words"), 0)], [(len(blocks[1]), 1)]]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(find, blocks * 100))
    assert found == wanted * 100
