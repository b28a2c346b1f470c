"""A requested stop ends all ranks after the same step, however fast they are."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclops.receipts.judge import judge
from ncclops.receipts.sources import load, load_records
from ncclops.record import shared_page, stop_point
from ncclops.record.paths import RunPaths
from ncclops.record.stop_point import StopPage
from tests.conftest import LIMIT_S
from tests.receipts.conftest import worker_environ

RANKS = 3

# Ranks that wait for each other in every step, as collectives make them, and are not in step
# otherwise: the faster may be ahead by up to one step.
WORKER = """
import os, random, sys, time
from ncclops import receipt
rank, ranks = int(os.environ["RANK"]), {ranks}
read_end, write_end = int(sys.argv[1]), int(sys.argv[2])
pause = random.Random(rank + {seed})
callbacks = []
@receipt.on_stop
def save():
    with open(f"saved-{{rank}}", "w") as file:
        file.write(str(last))
print("ready", flush=True)
for last in range(10**9):
    os.write(write_end, b"x")
    assert os.read(read_end, 1)
    if pause.random() < 0.01:
        time.sleep(0.002)
    receipt.step(last)
"""


class Ring:
    """Workers in a ring of pipes: a step of one needs the same step of its neighbour."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.run_dir = run_dir
        self.page = StopPage.create(run_dir)
        pipes = [os.pipe() for _ in range(RANKS)]
        self.workers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-c", WORKER.format(ranks=RANKS, seed=seed)),
                    *(str(pipes[rank][0]), str(pipes[(rank + 1) % RANKS][1])),
                ],
                env=worker_environ(run_dir, rank),
                cwd=run_dir,
                pass_fds=[fd for pipe in pipes for fd in pipe],
                stdout=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        for read_end, write_end in pipes:
            os.close(read_end)
            os.close(write_end)
        for worker in self.workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"

    @property
    def progress_pages(self) -> list[Path]:
        return [RunPaths(self.run_dir).rank(rank).progress for rank in range(RANKS)]

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()
        targets = [path.resolve() for path in self.run_dir.glob("*/**/progress")]
        shared_page.settle_all(self.run_dir)
        assert not RunPaths(self.run_dir).stop_page.is_symlink()
        assert not any(path.is_symlink() for path in self.progress_pages)
        assert not any(target.parent == Path("/dev/shm") for target in targets if target.exists())


@pytest.fixture(params=range(5))
def ring(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ring]:
    made = Ring(tmp_path, request.param)
    yield made
    made.end()


@pytest.mark.slow
def test_all_ranks_end_after_the_same_step(ring: Ring) -> None:
    step = ring.page.agree(ring.progress_pages)
    codes = [worker.wait(LIMIT_S) for worker in ring.workers]
    assert codes == [0] * RANKS
    saved = [(ring.run_dir / f"saved-{rank}").read_text() for rank in range(RANKS)]
    assert saved == [str(step)] * RANKS
    for rank in range(RANKS):
        records = ring.run_dir / "ranks" / str(rank) / "receipt.jsonl"
        assert load_records(records).last_step == step
        assert '"kind": "stop"' in records.read_text()
    if step >= 3:
        assert judge(load(ring.run_dir)).verdict == "healthy", "an agreed end is a clean end"


def test_a_proposal_holds_ranks_that_reach_it_and_can_be_withdrawn(tmp_path: Path) -> None:
    page = StopPage.create(tmp_path)
    rank = StopPage.attach(tmp_path)
    assert rank is not None
    assert not rank.requested()
    page.propose(10)
    assert rank.requested()
    assert not rank.ends_here(9), "steps before the proposed one go on"
    page.confirm()
    assert not rank.ends_here(9)
    assert rank.ends_here(10)
    page.withdraw()
    assert not rank.ends_here(10)
    shared_page.settle(RunPaths(tmp_path).stop_page)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["confirm", "withdraw", "later"])
def test_a_rank_at_the_proposed_step_waits_for_the_answer(tmp_path: Path, answer: str) -> None:
    page = StopPage.create(tmp_path)
    page.propose(4)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        asked = pool.apply_async(_ends_here, (tmp_path, 4))
        with pytest.raises(multiprocessing.TimeoutError):
            asked.get(0.2)
        if answer == "later":
            page.propose(5)
        else:
            getattr(page, answer)()
        assert asked.get(LIMIT_S) is (answer == "confirm")
    shared_page.settle(RunPaths(tmp_path).stop_page)


def _ends_here(run_dir: Path, step: int) -> bool:
    page = StopPage.attach(run_dir)
    assert page is not None
    return page.ends_here(step)


def test_a_rank_held_for_too_long_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_point, "HOLD_LIMIT", stop_point.HOLD_LIMIT * 0)
    page = StopPage.create(tmp_path)
    page.propose(4)
    assert not page.ends_here(4)
    shared_page.settle(RunPaths(tmp_path).stop_page)


def test_without_a_stop_page_training_is_not_concerned(tmp_path: Path) -> None:
    assert StopPage.attach(tmp_path) is None
