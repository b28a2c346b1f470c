"""Whatever answers in place of a rank's snapshot server, a look at the ranks ends, and says so."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.capture.run_snapshots import collect_run
from ncclops.diagnose.where import look
from ncclops.host import process_identity
from ncclops.host_name import host_name
from ncclops.record import snapshot_server_record
from ncclops.record.paths import RunPaths
from ncclops.record.snapshot_server_record import SnapshotServerRecord
from tests.conftest import LIMIT_S

_FAILED = "it failed to take its snapshot: "
_ANSWERS = {
    b"[]\n": _FAILED + "None",
    b"{}\n": _FAILED + "None",
    b'{"ok": false}\n': _FAILED + "None",
    b'{"ok": 1, "reason": ["a"]}\n': _FAILED + "['a']",
    b'{"ok": false, "reason": "one\\ntwo \\u001b[2J"}\n': _FAILED + "one two \\x1b[2J",
    b"[" * 60_000 + b"\n": "it cannot be asked from here (nested too deeply)",
    b"[" * 200_000 + b"\n": "it cannot be asked from here ([Errno 27] File too large)",
    b"": _FAILED + "refused (another user?)",
}


def _record(run: Path, address: str) -> None:
    """Record this process as rank 0, to be asked at ``address``."""
    current = process_identity.current()
    path = RunPaths(run).rank(0).snapshot_server
    path.parent.mkdir(parents=True)
    record = SnapshotServerRecord(
        rank=0,
        host=host_name(),
        pid=os.getpid(),
        started_ticks=current.started_ticks,
        address=address,
    )
    snapshot_server_record.write(path, record)


def _said(run: Path, address: str, limit: timedelta) -> str | None:
    """Why the rank, which is this process, did not answer at ``address``."""
    _record(run, address)
    return collect_run(run, [0], run / "out", limit).reasons.get(0)


@contextmanager
def _answering(answer: bytes, *, for_ever: bool = False) -> Iterator[str]:
    def serve() -> None:
        with suppress(OSError), closing(listener.accept()[0]) as one:
            one.recv(65536)
            one.sendall(answer)
            while for_ever:
                time.sleep(0.02)
                one.sendall(answer)

    address = f"ncclops-test-{os.urandom(8).hex()}"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind("\0" + address)
        listener.listen(1)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield address
        thread.join(LIMIT_S)


@pytest.mark.parametrize("answer", _ANSWERS, ids=range(len(_ANSWERS)))
def test_an_answer_that_is_none_is_told(answer: bytes, tmp_path: Path) -> None:
    with _answering(answer) as address:
        assert _said(tmp_path, address, timedelta(seconds=LIMIT_S)) == _ANSWERS[answer]


def test_an_answer_of_a_byte_now_and_then_is_waited_for_no_longer(tmp_path: Path) -> None:
    with _answering(b" ", for_ever=True) as address:
        said = _said(tmp_path, address, timedelta(seconds=0.4))
    assert said is not None
    assert said.startswith("no Python thread of it ran for 0.2 s")


@pytest.mark.parametrize("how", ["another user's run", "a link in place of the directory"])
def test_nothing_is_written_where_others_decide_where_it_comes_to_lie(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, theirs, temporary = (tmp_path / name for name in ("run", "theirs", "temporary"))
    theirs.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with _answering(b'{"ok": false, "reason": "as they like"}\n') as address:
        _record(run, address)
        if how == "another user's run":
            if os.geteuid() != 0:
                pytest.skip("needs root, to make a directory another user's")
            RunPaths(run).where.mkdir()
            os.chown(run, 65534, 65534)
        else:
            RunPaths(run).where.symlink_to(theirs)
        seen = look(run, limit=timedelta(seconds=2), native="none")
    assert seen.collected.reasons[0] == _FAILED + "as they like"
    assert seen.collected.directory.is_relative_to(temporary)
    assert list(theirs.iterdir()) == []
    assert list(RunPaths(run).where.iterdir()) == []
