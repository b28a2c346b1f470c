"""What a script has handed to ``sys.exit`` is what it says of its failure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ncclops.agent.last_output import last_words, unwritten
from ncclops.record.paths import RunPaths


@pytest.mark.parametrize(
    ("message", "callstack", "words"),
    [
        ("no such dataset", "Traceback …\nSystemExit: no such dataset\n", {0: "no such dataset"}),
        ("KeyError: 'x'", "Traceback …\nKeyError: 'x'\n", {}),
        ("", "Traceback …\nSystemExit: \n", {}),
    ],
)
def test_only_the_text_of_a_system_exit(
    tmp_path: Path, message: str, callstack: str, words: dict[int, str]
) -> None:
    paths = RunPaths(tmp_path)
    file = paths.rank(0).error(2)
    file.parent.mkdir(parents=True)
    recorded = {"message": message, "extraInfo": {"py_callstack": callstack}}
    file.write_text(json.dumps({"message": recorded}))
    run = cast(Any, SimpleNamespace(paths=paths))
    assert last_words(run, 2, [0, 1]) == words  # rank 1 has left nothing


def test_what_is_in_no_file_of_a_rank_is_taken_from_what_it_has_reported(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for rank, content in ((0, ""), (1, '{"message": "KeyError: \'x\'"}')):
        paths.rank(rank).root.mkdir(parents=True)
        paths.rank(rank).error(0).write_text(content)  # the disk was full when rank 0 wrote it
    run = cast(Any, SimpleNamespace(paths=paths))
    full = "OSError: [Errno 28] No space left on device"
    assert unwritten(run, 0, {0: full, 1: full, 2: full}) == {0: full, 2: full}
