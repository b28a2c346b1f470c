"""The run directory: made once, readable at any moment, and no reason to end a run."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ncclops.errors import UsageError
from ncclops.record import event_log
from ncclops.record.events import BootstrappedEvent, EventsLostEvent, FaultEvent, StepEvent
from ncclops.record.run_directory import RunDirectory
from ncclops.record.run_record import RunRecord
from ncclops.record.verdict_record import VerdictRecord

FAILED = VerdictRecord(
    run_id="r", outcome="failed", exit_code=1, reason="x" * 10_000, attempts=1, seconds=1
)


def create(path: Path) -> RunDirectory:
    return RunDirectory.create(exact=path, parent=None, node="n0")


def test_events_are_whole_lines_as_soon_as_they_are_written(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    run.add(FaultEvent(rank=3, cause="é\nline"))
    (line,) = run.paths.events.read_text().splitlines()
    record = json.loads(line)
    assert record.pop("ts") > 0
    assert {name: value for name, value in record.items() if value is not None} == {
        "event": "fault",
        "rank": 3,
        "node": "n0",
        "cause": "é\nline",
    }


def test_a_file_system_needs_no_files_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS, and others that are shared by nodes, know no ``O_TMPFILE``."""
    opened = os.open

    def without_nameless(path: Path, flags: int, *more: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", without_nameless)
    run = create(tmp_path / "run")
    run.write_verdict(FAILED)
    assert run.verdict_problem is None and run.paths.verdict.exists()
    assert not [path for path in run.path.iterdir() if path.name.startswith(".verdict")]


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    create(tmp_path / "run").write_run(RunRecord())
    with pytest.raises(UsageError, match="already holds a run"):
        create(tmp_path / "run")


@pytest.mark.parametrize("name", ["run.json", "agent.log", "store.log", "ranks", "control"])
def test_what_somebody_has_put_there_is_not_written_through(tmp_path: Path, name: str) -> None:
    """A link, to nothing yet: a rank's output would be appended to what it leads to."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").touch()
    (run / name).symlink_to(tmp_path / "another")
    with pytest.raises(UsageError, match="already holds a run"):
        create(run)
    (run / name).unlink()
    create(run)


def test_a_name_that_would_be_two_lines_is_refused(tmp_path: Path) -> None:
    wanted = tmp_path / "run\nncclops: verdict: another"
    with pytest.raises(UsageError, match="control character"):
        create(wanted)
    with pytest.raises(UsageError, match="control character"):
        RunDirectory.create(exact=None, parent=wanted, node="n0")
    assert not list(tmp_path.iterdir())


def test_of_several_that_want_one_directory_at_once_one_gets_it(tmp_path: Path) -> None:
    for attempt in range(20):
        barrier, path = threading.Barrier(8), tmp_path / str(attempt)

        def take(_: int, barrier: threading.Barrier = barrier, path: Path = path) -> bool:
            barrier.wait()
            try:
                create(path)
            except UsageError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(take, range(8))) == 1


def test_a_second_job_of_several_nodes_takes_no_directory_of_one_that_has_ended(
    tmp_path: Path,
) -> None:
    first = RunDirectory.create(exact=tmp_path, parent=None, node="n0", several=True)
    beside = RunDirectory.create(exact=tmp_path, parent=None, node="n1", several=True)
    assert beside.path == first.paths.of_node("n1")
    first.paths.verdict.touch()
    with pytest.raises(UsageError, match="already holds a run"):
        RunDirectory.create(exact=tmp_path, parent=None, node="n2", several=True)


def test_what_is_written_in_the_background_is_counted_where_it_is_lost(tmp_path: Path) -> None:
    run, said = create(tmp_path / "run"), list[str]()
    run.write_in_background(said.append)
    for step in range(100):
        run.add(StepEvent(step=step))
    run.flush()
    run.paths.events.rename(tmp_path / "before")
    run.paths.events.mkdir()
    for step in range(100):
        run.add(StepEvent(step=step))
    run.flush()
    run.paths.events.rmdir()
    (tmp_path / "before").rename(run.paths.events)
    run.add(StepEvent(step=100))
    run.flush()
    *steps, last, lost = event_log.read(run.paths.events)
    assert [event.step for event in steps if isinstance(event, StepEvent)] == list(range(100))
    assert isinstance(last, StepEvent) and last.step == 100
    assert isinstance(lost, EventsLostEvent) and lost.count == 100
    assert len(said) == 1 and "cannot write" in said[0]


def test_ids_differ_within_a_second(tmp_path: Path) -> None:
    runs = [RunDirectory.create(exact=None, parent=tmp_path, node="n") for _ in range(20)]
    assert len({run.run_id for run in runs}) == 20
    assert all(run.path.parent == tmp_path for run in runs)


def test_a_full_disk_is_reported_once_and_does_not_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Played with a limit on file sizes, which the kernel answers like a full disk."""
    run = create(tmp_path / "run")
    run.add(BootstrappedEvent(rank=0))
    size = run.paths.events.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    earlier = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        run.add(StepEvent(step=1))
        run.add(StepEvent(step=1))
        run.write_verdict(FAILED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, earlier)
    assert run.paths.events.stat().st_size == size
    assert not run.paths.verdict.exists()
    assert capfd.readouterr().err.count("cannot write") == 1
    assert run.verdict_problem == "File too large"


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("gone", ["removed", "moved", "made again by a rank"])
def test_a_directory_that_has_gone_is_made_again_for_the_verdict(tmp_path: Path, gone: str) -> None:
    """A rank may have removed it, and no other run of this host can begin there meanwhile."""
    run = create(tmp_path / "run")
    run.write_run(RunRecord())
    if gone == "removed":
        shutil.rmtree(run.path)
    else:
        run.path.rename(tmp_path / "elsewhere")
    if gone == "made again by a rank":
        (run.path / "incidents").mkdir(parents=True)
    run.write_verdict(FAILED)
    assert run.verdict_problem is None and run.paths.verdict.exists()


def test_a_verdict_is_written_beside_a_record_that_a_rank_has_removed(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    run.write_run(RunRecord())
    run.paths.run.unlink()
    run.write_verdict(FAILED)
    assert run.verdict_problem is None and run.paths.verdict.exists()


def test_a_path_through_a_loop_of_links_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="cannot write the run directory"):
        create(tmp_path / "loop" / "run")
