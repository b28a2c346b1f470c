"""What keeps a script from being started again in its process, and must not."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import logging
import os
import pickle
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

import pytest
import torch

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
    sys.path = found.path_list
    sys.path[:] = found.path
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
    assert sys.argv == list(before.argv)
    assert logging.getLogger().handlers == list(before.log_handlers)
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


@pytest.fixture
def start() -> Iterator[fresh.Start]:
    start = fresh.Start()
    yield start
    start.stop()
    start.restore()


# Of a script's own, which it imports: what is set here is set once in a process.
SETS = """
import logging, os, signal, sys, torch
import {below}
os.environ["SET_BY_IMPORT"] = "1"
os.environ["SET_BY_BOTH"] = "import"
sys.path.insert(0, "{name}-first")
sys.path.append("{name}-last")
logging.getLogger().addHandler(HANDLER := logging.NullHandler())
signal.signal(signal.SIGUSR2, HANDLE := lambda *_: None)
torch.set_default_dtype(torch.float64)
"""


def test_what_imports_have_changed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: fresh.Snapshot, start: fresh.Start
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sets_something.py").write_text(SETS.format(below="sets_below", name="set"))
    (tmp_path / "sets_below.py").write_text("import os\nos.environ['SET_BELOW'] = '1'\n")
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        os.environ["SET_BY_SCRIPT"] = "1"
        sys.path.append("of-the-script")
        module = importlib.import_module("sets_something")
        os.environ["SET_BY_BOTH"] = "script"
        os.environ["SET_BELOW"] = "script"
        logging.getLogger().addHandler(logging.NullHandler())
        torch.set_default_dtype(torch.float16)
        torch.set_num_threads(threads + 1)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        start.restore()
        names = ("SET_BY_IMPORT", "SET_BY_BOTH", "SET_BELOW", "SET_BY_SCRIPT")
        assert [os.environ.get(name) for name in names] == ["1", "import", "1", None]
        assert (sys.path[0], sys.path[-1]) == ("set-first", "set-last")
        assert "of-the-script" not in sys.path
        assert logging.getLogger().handlers == [*before.log_handlers, module.HANDLER]
        assert signal.getsignal(signal.SIGUSR2) is module.HANDLE
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_num_threads() == threads
        assert torch.get_float32_matmul_precision() == precision
        assert not torch.backends.cudnn.benchmark
    finally:
        start.stop()
        before.restore()
        for name in ("sets_something", "sets_below"):
            sys.modules.pop(name, None)
    assert torch.get_default_dtype() == torch.float32


def test_an_import_that_fails_and_a_look_for_a_module_are_no_trap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: fresh.Start
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_once.py").write_text(
        "import os\nassert os.environ.setdefault('TRIED', '0') == '1'\n"
    )
    spec = importlib.util.find_spec("fails_once")
    assert spec is not None
    assert isinstance(spec.loader, SourceFileLoader)
    with pytest.raises(AssertionError):
        importlib.import_module("fails_once")
    assert os.environ["TRIED"] == "0"
    os.environ["TRIED"] = "1"
    module = importlib.import_module("fails_once")
    assert type(module.__spec__) is ModuleSpec
    start.restore()
    assert "TRIED" not in os.environ  # the import that has not failed has set nothing
    del sys.modules["fails_once"]


FAILS = """
import logging, os
import stays
logging.getLogger().addHandler(logging.NullHandler())
os.environ["SET_BY_FAILED"] = "1"
raise ConnectionError
"""


def test_of_an_import_that_fails_what_its_own_imports_have_changed_stays(
    tmp_path: Path, before: fresh.Snapshot, start: fresh.Start
) -> None:
    """The next run imports it again, and would do the rest of it a second time."""
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "stays.py").write_text("import os\nos.environ['SET_BY_STAYS'] = '1'\n")
    try:
        for _ in range(2):
            sys.path.insert(0, str(tmp_path))
            with pytest.raises(ConnectionError):
                importlib.import_module("fails")
            start.restore()
            assert (os.environ.get("SET_BY_STAYS"), os.environ.get("SET_BY_FAILED")) == ("1", None)
            assert logging.getLogger().handlers == list(before.log_handlers)
    finally:
        start.stop()
        before.restore()
        sys.modules.pop("stays", None)


def test_specs_can_be_copied_and_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: fresh.Start
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reloaded.py").touch()
    found = importlib.util.find_spec("reloaded")
    module = importlib.reload(importlib.import_module("reloaded"))
    for spec in (found, module.__spec__):
        for copied in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
            assert type(copied) is ModuleSpec
            assert (copied.name, copied.origin) == ("reloaded", str(tmp_path / "reloaded.py"))
    start.stop()
    del sys.modules["reloaded"]


def test_variables_of_a_run_that_was_left_are_freed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second model beside the first may be more than the GPU's memory holds."""
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    file = tmp_path / "train.py"
    file.write_text("class Model: pass\nmodel = Model()\ndef main(): return model\n")
    script.run_script(str(file), [])
    model = weakref.ref(sys.modules["__main__"].model)
    script.let_go()
    assert script.has_variables()
    gc.collect()
    assert (model(), script.has_variables()) == (None, False)
