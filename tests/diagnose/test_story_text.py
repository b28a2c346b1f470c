"""A story in lines: what is in it is shown once, and no more for many ranks than for two."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ncclops.diagnose import story_text
from ncclops.record.story_record import CodeLine, Story, TriedStep

STORY = Story(
    what="rank 1 on n1 raised ValueError: no at /home/me/train.py:12 in step",
    rank=1,
    host="n1",
    code=[
        CodeLine(file="/home/me/train.py", line=30, function="<module>", text="main()"),
        CodeLine(file="/home/me/train.py", line=12, function="step", calls="5 frames in torch"),
    ],
    class_="user-error",
    confidence=0.5,
    summary="the program raised an exception of its own",
    stopped="again in new processes",
    next_steps=["a", "b", "c", "d"],
    log="/runs/x/ranks/1/stderr.log",
    log_host="n1",
    next_command="ncclops incident /runs/x 4",
)


def test_each_part_has_its_line() -> None:
    assert list(story_text.rows(STORY)) == [
        ("code", "/home/me/train.py:30 in <module>: main()"),
        ("", "/home/me/train.py:12 in step"),
        ("", "... 5 frames in torch"),
        ("class", "user-error (0.5): the program raised an exception of its own"),
        ("stopped", "again in new processes"),
        ("do", "a"),
        ("", "b"),
        ("", "c"),
        ("log", "/runs/x/ranks/1/stderr.log on n1"),
        ("next", "ncclops incident /runs/x 4  # on n1"),
    ]


def test_of_what_lies_on_this_node_no_host_is_named() -> None:
    *_, log, command = story_text.rows(msgspec.structs.replace(STORY, log_host=None))
    assert (log, command) == (("log", STORY.log), ("next", STORY.next_command))


def test_the_host_is_named_where_the_sentence_does_not() -> None:
    told = msgspec.structs.replace(STORY, what="rank 1 never came")
    assert next(story_text.rows(told)) == ("rank", "1 on n1")


def test_restarts_are_counted_however_many_and_name_the_ranks_that_are_missing() -> None:
    def restarts(count: int, *lost: int) -> list[TriedStep]:
        return [
            TriedStep(at=1.0, kind="restart", what="restart", lost=list(lost)) for _ in range(count)
        ]

    new = TriedStep(at=2.0, kind="attempt", what="attempt 2")
    left = TriedStep(at=2.0, kind="escalation", what="no further restart in place")
    assert story_text.tried([*restarts(3), left, new, *restarts(1)]) == (
        "3 restarts in place, new processes, 1 restart in place"
    )
    many = story_text.tried(restarts(2, *range(512)))
    assert many == "2 restarts in place (without ranks 0-511)"


def test_paths_below_the_current_directory_are_as_one_types_them(tmp_path: Path) -> None:
    assert story_text.shown(f"see {Path.cwd()}/runs/x") == "see runs/x"
    assert story_text.shown(f"see {tmp_path}/x") == f"see {tmp_path}/x"
