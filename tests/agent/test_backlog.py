"""A run ends within seconds however much its ranks have written, and says what was not read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ncclops.agent.backlog import MOST_BYTES, MOST_LAST_BYTES, Patience, gaps
from ncclops.agent.live_scan import LiveDiagnosis, LiveScan
from ncclops.agent.network_watch import NetworkLines
from ncclops.agent.workers import Exit
from ncclops.receipts.log_receipts import PrintedReceipts

SPANS = st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)


@given(st.lists(SPANS, max_size=20), st.integers(0, 1 << 41))
def test_no_more_is_read_than_allowed_and_all_where_that_is_enough(
    spans: list[tuple[int, int]], most: int
) -> None:
    unread = {Path(str(number)): span for number, span in enumerate(spans)}
    found = gaps(unread, most)
    total = sum(end - begin for begin, end in spans)
    left_out = sum(end - begin for begin, end in found.values())
    assert total - left_out == min(total, most)
    for path, (begin, end) in found.items():
        assert unread[path][0] <= begin < end <= unread[path][1]


def test_small_files_are_read_whole_beside_large_ones() -> None:
    flood, words = Path("stdout.log"), Path("stderr.log")
    found = gaps({flood: (100, 5 << 30), words: (0, 1000)})
    assert words not in found
    begin, end = found[flood]
    assert begin - 100 >= MOST_BYTES // 3
    assert (5 << 30) - end >= MOST_BYTES // 3


def scan(
    path: Path, content: bytes, patience: Patience | None = None
) -> tuple[LiveDiagnosis, PrintedReceipts]:
    """What a scan of ``content`` shows that was written before anything of it was read."""
    path.write_bytes(b"")
    printed = PrintedReceipts(path.parent, lambda rank, seen: None)
    printed.follow({path: 0})
    live = LiveScan({path: 0}, printed, {}, NetworkLines(lambda rank, seen: None))
    path.write_bytes(content)
    live._patience = patience or live._patience
    live._patience.begin()
    live._finishing.set()  # the processes have ended before the thread looks for the first time
    live.start()
    return finish(live), printed


def finish(
    live: LiveScan, exits: Mapping[int, Exit] | None = None, raised: Mapping[int, str] | None = None
) -> LiveDiagnosis:
    """What ``live`` shows, with nothing known beside its output but these."""
    return live.finish(
        exits or {},
        None,
        starting_up=None,
        has_trained=False,
        driver={},
        memory={},
        last_words={},
        raised=raised or {},
    )


def test_the_last_lines_of_a_flood_are_classified_and_the_gap_is_named(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    flood = b"an example of ordinary output, of no meaning\n" * (2 * MOST_BYTES // 45)
    steps = b"step 1 loss 2.0\n", b"step 2 loss 1.5\n"
    error = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    content = steps[0] + flood + steps[1] + error
    found, printed = scan(path, content, Patience(lambda: 0.0))  # however long that takes
    [(rank, where, (begin, end))] = found.passed_over
    assert (rank, where) == (0, path)
    assert len(steps[0]) < begin < end < len(content) - len(error)
    assert content[end - 1 : end] == b"\n"  # no line is read from its middle
    assert found.report.verdict.class_ == "gpu-oom"
    proof = found.report.evidence[0]
    assert proof.file == f"{path} (from byte {end})"
    assert content[end:].splitlines()[proof.line - 1] == error.rstrip()
    assert [facts.steps for facts in printed.facts()] == [2]


def test_output_that_is_not_much_is_read_whole(tmp_path: Path) -> None:
    found, _ = scan(tmp_path / "stdout.log", b"ordinary output\n" * 100_000)
    assert not found.passed_over


ERROR = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def test_on_a_busy_machine_the_last_lines_are_read_in_time(tmp_path: Path) -> None:
    """Each look at the clock costs half a second: twenty parts are read, then only the end."""
    seconds = itertools.count()
    path, content = tmp_path / "stdout.log", b"ordinary output\n" * 500_000 + ERROR
    found, _ = scan(path, content, Patience(lambda: next(seconds) / 4))
    [(_, _, (begin, end))] = found.passed_over
    assert 0 < begin < end < len(content)
    assert len(content) - end <= MOST_LAST_BYTES
    assert found.report.verdict.class_ == "gpu-oom"
    assert found.error is None


def test_without_any_time_all_is_passed_over_and_no_internal_error_is_told(tmp_path: Path) -> None:
    times = itertools.chain([0.0], itertools.repeat(100.0))
    found, printed = scan(tmp_path / "stdout.log", ERROR * 9, Patience(lambda: next(times)))
    assert [span for _, _, span in found.passed_over] == [(0, len(ERROR * 9))]
    assert found.error is None and not printed.broken
    assert found.report.verdict.class_ != "gpu-oom"


def test_an_exception_that_is_in_no_log_is_evidence(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"")
    printed = PrintedReceipts(path.parent, lambda rank, seen: None)
    live = LiveScan({path: 0}, printed, {}, NetworkLines(lambda rank, seen: None))
    live.start()
    raised = {0: "OSError: [Errno 28] No space left on device"}
    found = finish(live, {0: Exit(code=1, signal=None)}, raised)
    assert found.report.verdict.signature == "disk-full"
