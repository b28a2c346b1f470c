"""Which rank the terminal shows once the one that it showed is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from ncclops.agent.job import Job
from ncclops.agent.layout import Shown
from ncclops.agent.terminal import Terminal
from ncclops.record.run_directory import RunDirectory


def test_another_rank_is_shown_in_the_place_of_the_only_one_that_was(tmp_path: Path) -> None:
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")
    choice = Shown(stdout=frozenset({0}), stderr=frozenset({0}))
    what = SimpleNamespace(run=run, shown=choice, attached=None, stdout_is_data=False, quiet=True)
    terminal = Terminal(cast(Job, what))
    terminal.follow([4, 5, 6])
    for lost, others, shown in (
        (5, [4, 6], {4}),  # it was not shown
        (4, [6], {6}),
        (6, [], set()),  # nobody goes on
    ):
        terminal.lose(lost, others)
        assert {source.rank for source in terminal._shown} == shown
