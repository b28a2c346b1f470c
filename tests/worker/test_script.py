"""A script under the worker entry runs as if it were run by ``python SCRIPT``."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.diagnose import own_code
from ncclops.record.error_file import read_error
from ncclops.stacks.frame import Frame
from ncclops.worker import script

pytestmark = pytest.mark.slow

LIMIT_S = 60

# Prints what a script can see of how it was started, and exercises what looks `__main__` up later.
PROBE = """
import atexit, multiprocessing, pickle, sys, threading

class Thing:
    pass

def child(queue):
    queue.put((__name__, sys.argv))

def later():
    print("at exit:", sys.modules["__main__"].Thing.__module__)

if __name__ == "__main__":
    print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
    print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
    print(__builtins__.__name__, __cached__ if __spec__ is None else "")
    print("annotations evaluated:", (lambda x: 0).__annotations__, end="")
    def annotated(x: 1 + 1): pass
    print(annotated.__annotations__)
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    atexit.register(later)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print("child:", queue.get(timeout=100)[0])
    process.join()
"""

Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]


def run(prefix: list[str], arguments: list[str], cwd: Path, **env: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, *prefix, *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout, done.stderr


def both(arguments: list[str], cwd: Path, **env: str) -> tuple[Outcome, Outcome]:
    """What plain python does, and what the worker entry does."""
    plain = run([], arguments, cwd, **env)
    return plain, run(["-m", "ncclops.worker"], arguments, cwd, **env)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Scripts and a package: ``probe.py``, ``linked.py`` elsewhere, and ``trainer``."""
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked.py").symlink_to(tmp_path / "probe.py")
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("WORD = 'relative import'\n")
    # Without the probe: multiprocessing itself cannot spawn from a package's __main__.
    (package / "__main__.py").write_text("from .part import WORD\nprint(WORD, __spec__.name)\n")
    (package / "train.py").write_text(f"from . import part\nprint(part.WORD)\n{PROBE}")
    (package / "broken.py").write_text("import not_there_at_all\n")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "from part import SHOWN\nprint(__name__, *map(str, SHOWN))")
        archive.writestr("part.py", ARCHIVED)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["probe.py", "--lr", "0.1", "--", "-m", "x y"],
        ["./probe.py"],
        ["elsewhere/linked.py"],
        ["app.pyz", "--flag"],
        ["-m", "trainer", "a"],
        ["-m", "trainer.train", "--flag"],
    ],
)
def test_it_sees_what_python_shows(arguments: list[str], project: Path) -> None:
    plain, worker = both(arguments, project)
    assert plain[0] == 0, plain[2]
    assert worker == plain


ARCHIVED = """
import sys
main = sys.modules["__main__"]
kept = ("__file__", "__package__", "__spec__")
SHOWN = [*(getattr(main, name) for name in kept), type(main.__loader__).__name__, sys.argv,
         sys.path[0]]
"""
FUNCTIONS = """
import multiprocessing, pickle, sys

class Thing: pass

def child(queue): queue.put(__name__)

def main():
    print(__name__, sys.argv, type(pickle.loads(pickle.dumps(Thing()))) is Thing, flush=True)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print("child:", queue.get(timeout=100), flush=True)
    process.join()
    return 3

def fail(): raise KeyError("boo")

if __name__ == "__main__":
    print("not this")
"""


def test_a_function_of_a_file_is_called_as_an_import_would(project: Path) -> None:
    (project / "jobs.py").write_text(FUNCTIONS)
    worker = ["-m", "ncclops.worker", "-f"]
    code, stdout, stderr = run(worker, ["jobs.py:main", "--lr", "1"], project)
    assert (code, stderr) == (0, "")
    assert stdout == "jobs ['jobs.py', '--lr', '1'] True\nchild: jobs\n"
    _, _, plain = run(["-c", "import jobs; jobs.fail()"], [], project)
    code, _, stderr = run(worker, ["jobs.py:fail"], project)
    assert code == 1
    assert stderr.splitlines()[1:] == plain.splitlines()[2:], "the traceback starts in the file"


def test_a_safe_path_stays_safe(project: Path) -> None:
    plain, worker = both(["probe.py"], project, PYTHONSAFEPATH="1", PYTHONPATH=_source_path())
    assert worker == plain


def _source_path() -> str:
    import ncclops

    return str(Path(ncclops.__file__).parent.parent)


ENDINGS = {
    "exception": "def f():\n    raise KeyError('boo')\nf()\n",
    "chained": "try:\n  1 / 0\nexcept ZeroDivisionError as e:\n  raise ValueError('x') from e\n",
    "syntax": "def f(:\n",
    "exit code": "import sys; sys.exit(7)\n",
    "exit text": "import sys; sys.exit('gone')\n",
    "exit true": "raise SystemExit(True)\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n",
    "thread": "import threading\nthreading.Thread(target=lambda: print('late')).start()\n",
    "own hook": "import sys\nsys.excepthook = lambda k, e, t: print(k, t.tb_lineno)\n1 / 0\n",
    "missing import": "import not_there_at_all\n",
    "coding": "# -*- coding: latin-1 -*-\nprint('\\xe9')\n",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_it_ends_as_under_python(name: str, tmp_path: Path) -> None:
    """Exit code, signal, traceback and output; no frame of ours is in any traceback."""
    (tmp_path / "script.py").write_text(ENDINGS[name], encoding="latin-1")
    plain, worker = both(["script.py"], tmp_path)
    assert worker == plain


def test_a_broken_module_says_what_it_misses(project: Path) -> None:
    code, _, stderr = run(["-m", "ncclops.worker"], ["-m", "trainer.broken"], project)
    assert code == 1
    assert stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'not_there_at_all'"


def test_an_unknown_module_is_one_line(project: Path) -> None:
    plain, worker = both(["-m", "trainer.nowhere"], project)
    assert worker == plain


def test_an_exception_is_described_in_the_error_file_once(tmp_path: Path) -> None:
    """The file that torchelastic's ``record`` writes; what it wrote is not overwritten."""
    error_file = tmp_path / "error.json"
    (tmp_path / "script.py").write_text("raise KeyError('boo')\n")
    environ = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    run(["-m", "ncclops.worker"], ["script.py"], tmp_path, **environ)
    described = json.loads(error_file.read_text())["message"]
    assert described["message"] == "KeyError: 'boo'"
    assert "Traceback" in described["extraInfo"]["py_callstack"]
    assert described["extraInfo"]["timestamp"].isdecimal()
    error_file.write_text("theirs")
    run(["-m", "ncclops.worker"], ["script.py"], tmp_path, **environ)
    assert error_file.read_text() == "theirs"


@pytest.mark.parametrize("raised", ["KeyError", "SystemExit"])
def test_of_an_exception_with_a_long_message_as_much_is_recorded_as_is_read(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the script's is set around it
    code = f"boo {'x y ' * 1_000_000} the end"
    with pytest.raises((KeyError, SystemExit)), script._described():
        raise KeyError(code) if raised == "KeyError" else SystemExit(code)
    recorded = read_error(tmp_path / "error.json")
    assert recorded is not None
    assert "boo x y" in recorded.message
    assert "the end" in recorded.message
    assert recorded.is_system_exit is (raised == "SystemExit")


class Textless:
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (256, "SystemExit: 256"),
        (ValueError("no path /data"), "no path /data"),
        (1.5, "1.5"),
        (Textless(), "<exception str() failed>"),
    ],
)
def test_what_the_exit_code_does_not_tell_of_an_end_is_recorded(
    code: object, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the script's is set around it
    with pytest.raises(SystemExit), script._described():
        sys.exit(code)  # type: ignore[arg-type]
    recorded = read_error(tmp_path / "error.json")
    assert recorded is not None
    assert recorded.message == told
    assert recorded.is_system_exit is (code != 256)


@pytest.mark.parametrize("called", ["", ":main"])
def test_a_script_that_was_replaced_by_a_pipe_is_not_waited_for(
    called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "train.py")
    for name, value in (("argv", sys.argv), ("path", [*sys.path]), ("excepthook", sys.excepthook)):
        monkeypatch.setattr(sys, name, value)
    for name in ("__main__", "__mp_main__", "train"):
        monkeypatch.setitem(sys.modules, name, sys)
    run_it = script.run_function if called else script.run_script
    with pytest.raises(OSError, match="it is no regular file"):
        run_it(f"{tmp_path / 'train.py'}{called}", [])


def test_a_traceback_quotes_no_file_that_is_a_pipe_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linecache, "updatecache", linecache.updatecache)
    for name in ("excepthook", "__excepthook__"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    script.quote_files_only()
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1 / 0  # here")
    pipe, file = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    programs = [compile("1 / 0", name, "exec") for name in (pipe, file)]
    (tmp_path / "a.py").unlink()
    os.mkfifo(pipe)
    shown = []
    for program in programs:
        with pytest.raises(ZeroDivisionError) as raised:
            exec(program)
        shown.append("".join(traceback.format_exception(raised.value)))
    assert ["# here" in text for text in shown] == [False, True]
    frames = [Frame(file=name, line=1, function="<module>") for name in (pipe, file)]
    assert [line.text for line in own_code.of_stack(frames)] == ["1 / 0  # here", ""]


def test_a_script_that_raises_once_a_pipe_has_its_place_ends(tmp_path: Path) -> None:
    """The interpreter prints the last traceback itself, and would wait for the pipe's writer;
    torch calls what it has found as hook."""
    (tmp_path / "train.py").write_text("""
import os, sys
found = sys.excepthook
sys.excepthook = lambda *raised: found(*raised)
os.unlink(__file__)
os.mkfifo(__file__)
raise ExceptionGroup("both", [KeyError("first"), KeyError("second")])
""")
    code, _, shown = run(["-m", "ncclops.worker"], ["train.py"], tmp_path)
    assert code == 1
    assert "ExceptionGroup: both" in shown and "KeyError: 'second'" in shown
    assert "train.py" in shown and "ncclops" not in shown


def test_a_thread_that_raises_once_a_pipe_has_the_place_of_the_script_ends(tmp_path: Path) -> None:
    """The default hook of threads reads the file as well, and the process would wait for it."""
    (tmp_path / "train.py").write_text("""
import os, threading
os.unlink(__file__)
os.mkfifo(__file__)
for raised in (KeyError("first"), SystemExit("second")):
    def work():
        raise raised
    at_work = threading.Thread(target=work, name="loader")
    at_work.start()
    at_work.join()
print("goes on")
""")
    code, printed, shown = run(["-m", "ncclops.worker"], ["train.py"], tmp_path)
    assert (code, printed) == (0, "goes on\n")
    assert "Exception in thread loader:" in shown and "KeyError: 'first'" in shown
    assert "train.py" in shown and "second" not in shown


def test_exiting_on_purpose_is_no_error(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    (tmp_path / "script.py").write_text("raise SystemExit(3)\n")
    run(["-m", "ncclops.worker"], ["script.py"], tmp_path, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert not error_file.exists()


def test_what_a_forked_child_raises_is_not_the_rank_s_error(tmp_path: Path) -> None:
    """The rank may be killed later, and has not raised it."""
    error_file = tmp_path / "error.json"
    (tmp_path / "script.py").write_text(
        "import os\nif os.fork() == 0:\n    raise KeyError('boo')\nos.wait()\n"
    )
    run(["-m", "ncclops.worker"], ["script.py"], tmp_path, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert not error_file.exists()


def test_the_worker_entry_costs_no_torch_and_no_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys; print([m for m in ('torch', 'ncclops.launch', 'psutil') if m in sys.modules])"
    )
    _, stdout, _ = run(["-m", "ncclops.worker"], ["script.py"], tmp_path)
    assert stdout == "[]\n"
