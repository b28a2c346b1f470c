"""What keeps a script from being started again in its process, and must not."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ncclops.worker import fresh, script


class Unclosable(logging.Handler):
    """Like one whose connection is broken."""

    def close(self) -> None:
        raise RuntimeError("cannot be closed")


def _adds_an_unclosable_handler() -> None:
    logging.getLogger().addHandler(Unclosable())


def _makes_the_path_a_tuple() -> None:
    sys.path = tuple(sys.path)  # type: ignore[assignment]


def _has_signals_written_to_a_socket() -> None:
    """As event loops do; with the loop the socket is gone."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    signal.set_wakeup_fd(ours.fileno())
    ours.close()
    theirs.close()


@pytest.fixture
def before() -> Iterator[fresh.Snapshot]:
    found = fresh.Snapshot.take()
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    yield found
    root.handlers[:] = handlers
    sys.path, entries = found.path
    sys.path[:] = entries
    signal.set_wakeup_fd(-1)


@pytest.mark.parametrize(
    "change",
    [_adds_an_unclosable_handler, _makes_the_path_a_tuple, _has_signals_written_to_a_socket],
)
def test_what_a_script_has_changed_is_put_back(
    change: Callable[[], None], before: fresh.Snapshot
) -> None:
    path, handlers = sys.path, logging.getLogger().handlers[:]
    change()
    before.restore()
    assert sys.path is path
    assert logging.getLogger().handlers == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_what_cannot_be_put_back_is_logged_and_the_rest_is_put_back(
    before: fresh.Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error there came with every start, before what ends starts without a step."""
    logged: list[str] = []

    def fails() -> None:
        raise PermissionError("not to be ended")

    monkeypatch.setattr(fresh, "_end_children", fails)
    monkeypatch.setattr(
        logging.getLogger("ncclops.restart"), "warning", lambda text, **_: logged.append(text)
    )
    _adds_an_unclosable_handler()
    sys.argv = ["changed"]
    before.restore()
    assert sys.argv == before.argv
    assert logging.getLogger().handlers == before.log_handlers
    assert logged == ["what the script has changed stays in part"]


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory has been removed."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


def test_a_script_runs_again_once_the_current_directory_is_gone(
    tmp_path: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch, before: fresh.Snapshot
) -> None:
    before.restore()
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    file = tmp_path / "train.py"
    file.write_text("import os\nos.environ['FRESH_RAN'] = __file__\n")
    monkeypatch.setenv("FRESH_RAN", "no")
    script.run_script(str(file), [])
    assert os.environ["FRESH_RAN"] == str(file)


def test_without_a_current_directory_nothing_is_put_back_into_it(
    nowhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fresh.Snapshot.take().directory is None
