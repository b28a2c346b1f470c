"""The list of hosts for a scheduler: what is convicted is in it, and nothing else is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclops.preflight.hand_over import update_exclude_file


def test_hosts_come_and_go_and_others_stay(tmp_path: Path) -> None:
    listed = tmp_path / "exclude"
    listed.write_text("n9\nn1\n")
    update_exclude_file(listed, {"n1": False, "n2": True, "n3": False})
    assert listed.read_text() == "n9\nn2\n"


def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"it is no regular file: .*pipe"):
        update_exclude_file(pipe, {"n1": True})
