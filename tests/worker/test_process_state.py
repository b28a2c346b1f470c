"""What imports change for a whole process, which a worker that is forked would begin with."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ncclops.worker.process_state import ProcessState, change_variables, changed_variables


@contextmanager
def _directory(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _others(path: Path) -> Iterator[None]:
    umask = os.umask(0o027)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if soft == 0 else 0, hard))
    try:
        yield
    finally:
        os.umask(umask)
        signal.signal(signal.SIGUSR1, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_what_imports_may_change_is_seen(tmp_path: Path) -> None:
    before = ProcessState.now()
    assert ProcessState.now().changed(before) == []
    with _directory(tmp_path):
        assert ProcessState.now().changed(before) == ["the current directory"]
        tmp_path.rmdir()
        assert ProcessState.now().changed(before) == ["the current directory"]
    with suppress(ValueError), _others(tmp_path):  # no core files at all: the limit stays
        assert ProcessState.now().changed(before)[:3] == [
            "the umask",
            "the handling of signals",
            "the signals that are blocked",
        ]
    assert ProcessState.now().changed(before) == []


def test_variables_that_imports_have_set_are_set_where_the_import_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("T_SET", "T_KEPT", "T_GONE", "T_OTHER"):
        monkeypatch.setenv(name, "before")
    environ = dict(os.environ)
    os.environ |= {"T_SET": "after", "T_OTHER": "after"}
    monkeypatch.setenv("T_NEW", "after")
    del os.environ["T_GONE"]
    changes = changed_variables(environ)
    assert changes == {
        "T_SET": ("before", "after"),
        "T_OTHER": ("before", "after"),
        "T_NEW": (None, "after"),
        "T_GONE": ("before", None),
    }
    os.environ |= environ | {"T_OTHER": "a worker's own"}
    del os.environ["T_NEW"]
    change_variables(changes)
    seen = {name: os.environ.get(name) for name in (*changes, "T_KEPT")}
    assert seen == {
        "T_SET": "after",
        "T_OTHER": "a worker's own",
        "T_NEW": "after",
        "T_GONE": None,
        "T_KEPT": "before",
    }
