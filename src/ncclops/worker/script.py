"""Runs a script or a module as ``__main__``, the way ``python SCRIPT`` and ``python -m`` do.

``runpy`` restores the old ``__main__`` when the code has run, which is too early: threads, exit
handlers and multiprocessing's children still look for the script's. Here ``__main__`` stays.
"""

from __future__ import annotations

import importlib.util
import json
import linecache
import os
import sys
import threading
import time
import traceback
import weakref
import zipimport
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from ncclops.record import worker_record
from ncclops.record.events import ScriptExitEvent
from ncclops.record.regular_file import can_be_quoted, read_regular
from ncclops.restart.raised import described
from ncclops.worker.process_state import current_directory

# What the interpreter was started with; kept, because dropping a module clears its globals.
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_launcher_main = sys.modules.get("__main__")


class _Run:
    """The latest run of the script."""

    module: ModuleType | None = None  # whose global variables are the script's
    variables: weakref.ref[Any] | None = None  # to what these alone refer to


_run_of_script = _Run()


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run the file ``path``; its exceptions and ``SystemExit`` come out as they are."""
    absolute = _absolute(path)
    sys.argv = [path, *arguments]
    if (archive := _archive(absolute)) is not None:
        sys.path.insert(0, absolute)
        _run_loaded(archive.find_spec("__main__"), "__main__")
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    main = ModuleType("__main__")
    main.__file__ = absolute
    main.__loader__ = SourceFileLoader("__main__", absolute)
    main.__dict__["__cached__"] = None
    _run(main, lambda: _compile(absolute))


def _compile(absolute: str) -> CodeType:
    # It may have been replaced since the launch: a pipe is waited for, a device has no end.
    content = read_regular(Path(absolute))
    # dont_inherit: this file's own __future__ imports are not the script's.
    return compile(content, absolute, "exec", dont_inherit=True)


def _absolute(path: str) -> str:
    """Like the interpreter: neither symlinks nor dots are resolved, and where the current directory
    has been removed, nothing is added."""
    return os.path.join(current_directory() or "", path)  # noqa: PTH118


def _archive(path: str) -> zipimport.zipimporter | None:
    """The zip archive with an application that ``path`` is, such as zipapp or pex make."""
    try:
        return zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return None


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run the module ``name``, or its ``__main__`` if it is a package."""
    sys.argv = ["-m", *arguments]
    if (directory := current_directory()) is not None:
        _set_first_path(directory)
    spec = _find_module(name)
    if spec is not None:
        sys.argv[0] = spec.origin or name
    _run_loaded(spec, name)


def _run_loaded(spec: ModuleSpec | None, name: str) -> None:
    """Run the module of ``spec``, of this name, as ``__main__``."""
    if spec is None or spec.loader is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    main = ModuleType("__main__")
    main.__file__ = spec.origin
    main.__spec__ = spec
    main.__package__ = spec.parent
    main.__loader__ = spec.loader
    main.__dict__["__cached__"] = spec.cached
    get_code: Callable[[str], CodeType] = spec.loader.get_code  # type: ignore[attr-defined]
    _run(main, lambda: get_code(spec.name))


def run_function(target: str, arguments: Sequence[str]) -> None:
    """Import the file of ``target`` (``FILE.py:FUNCTION``) anew, and call the function.

    ``__name__`` is the file's, as for any module, so what stands under ``if __name__ ==
    "__main__"`` does not run. What the function returns is ignored, as ``main()`` at the end of
    a script would.
    """
    path, _, name = target.rpartition(":")
    absolute = _absolute(path)
    sys.argv = [path, *arguments]
    _set_first_path(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    module = ModuleType(Path(path).stem)
    module.__file__ = absolute
    module.__loader__ = SourceFileLoader(module.__name__, absolute)
    module.__spec__ = ModuleSpec(module.__name__, module.__loader__, origin=absolute)
    module.__spec__.has_location = True
    sys.modules[module.__name__] = module
    _remember(module)
    # A spawned child needs no part of it: it imports the module by its name.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    with _described():
        exec(_compile(absolute), module.__dict__)
        getattr(module, name)()


def _find_module(name: str) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            return importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise  # the package is there, and something that it imports is not
    return spec


def _set_first_path(directory: str) -> None:
    # PYTHONSAFEPATH leaves it out. -P does not: the agent gives it to keep the current one out.
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, directory)


def _run(main: ModuleType, load: Callable[[], CodeType]) -> None:
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    # multiprocessing knows it by a second name from its own import on, which may have been ours.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    _remember(main)
    with _described():
        exec(load(), main.__dict__)


def _remember(module: ModuleType) -> None:
    _run_of_script.module = module
    with suppress(TypeError):  # a loader without weak references
        _run_of_script.variables = weakref.ref(module.__loader__)


def let_go() -> None:
    """Drop the script's module after an interrupted run, so that its global variables are freed.

    The next run would replace it, and first make its own model and stores beside those.
    """
    module, _run_of_script.module = _run_of_script.module, None
    if module is not None:
        for name in [name for name, known in sys.modules.items() if known is module]:
            sys.modules[name] = ModuleType(name)


def has_variables() -> bool:
    """Whether the global variables of the run that was let go of are still there."""
    return _run_of_script.variables is not None and _run_of_script.variables() is not None


@contextmanager
def _described() -> Iterator[None]:
    """What comes out of the script is shown, and recorded, as if nothing were around it."""
    worker = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != worker:
            pass  # a child that the script has forked, and which may fail alone
        elif isinstance(error, Exception):
            _record(list(described(error).format_exception_only())[-1].strip(), error)
        elif isinstance(error, SystemExit):
            _record_exit(error)
        sys.excepthook = without_our_frames(sys.excepthook)
        raise


def _record_exit(error: SystemExit) -> None:
    """What the process's exit code will not tell of its end."""
    if error.code in (None, 0):
        _report_exit(error.__traceback__)
    elif not isinstance(error.code, int):
        words = "".join(described(error).format_exception_only())
        _record(words.partition(": ")[2].strip(), error)
    elif error.code & 0xFF == 0:  # all that the exit code has of it
        _record(f"SystemExit: {error.code}", error)


def quote_files_only() -> None:
    """Have tracebacks in this process quote no file that is a pipe, a device or without end by now:
    a rank that has raised would wait for it before the others hear of that."""
    update = linecache.updatecache

    def updatecache(filename: str, *rest: Any, **named: Any) -> list[str]:
        return update(filename, *rest, **named) if can_be_quoted(filename) else []

    linecache.updatecache = updatecache

    # The interpreter's own hooks, which torch's calls, read the files themselves, not by linecache.
    show = sys.__excepthook__

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if all(map(can_be_quoted, _files(error))):
            show(kind, error, trace)
        else:
            traceback.print_exception(error)

    if sys.excepthook is show:
        sys.excepthook = excepthook
    sys.__excepthook__ = excepthook
    show_in_thread = threading.excepthook

    def in_thread(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None or args.exc_type is SystemExit or all(map(can_be_quoted, _files(error))):
            show_in_thread(args)
        else:
            name = "" if args.thread is None else args.thread.name
            sys.stderr.write(f"Exception in thread {name}:\n")
            traceback.print_exception(error)

    threading.excepthook = threading.__excepthook__ = in_thread


def without_our_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` (the default, or the script's own), shown tracebacks as without ncclops.

    Our frames stand before the script's, and where a wait for other ranks is measured also between
    the script's and torch's.
    """

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        trace = _not_ours(trace)
        for link in _chain(error):
            link.__traceback__ = _not_ours(link.__traceback__)
        hook(kind, error.with_traceback(trace), trace)

    return excepthook


def leave_out_our_frames(stack: traceback.StackSummary) -> None:
    """The same for a traceback that is described already."""
    stack[:] = [frame for frame in stack if not _is_our_file(frame.filename)]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """What led to ``error``, and the members of groups, each once."""
    seen = {id(error)}
    links = _linked(error)
    while links:
        link = links.pop()
        if id(link) not in seen:
            seen.add(id(link))
            yield link
            links += _linked(link)


def _linked(error: BaseException) -> list[BaseException]:
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [link for link in (error.__cause__, error.__context__, *members) if link is not None]


def _files(error: BaseException) -> set[str]:
    """The source files that a traceback of ``error`` quotes."""
    traces = [link.__traceback__ for link in (error, *_chain(error))]
    return {frame.f_code.co_filename for trace in traces for frame, _ in traceback.walk_tb(trace)}


def _not_ours(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without our frames."""
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    at = trace
    while at is not None:
        while at.tb_next is not None and _is_ours(at.tb_next):
            at.tb_next = at.tb_next.tb_next
        at = at.tb_next
    return trace


def _is_ours(trace: TracebackType) -> bool:
    return _is_our_file(trace.tb_frame.f_code.co_filename)


def _is_our_file(filename: str) -> bool:
    return filename.startswith((_PACKAGE, "<frozen runpy>"))


def forget_error() -> None:
    """Remove what an earlier run of the script has recorded: this process goes on, and if it ends,
    it is not for that."""
    if target := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(target).unlink()


def _report_exit(trace: TracebackType | None) -> None:
    """Say where the script has ended itself: others may still have needed this rank."""
    frames = [f for f in traceback.extract_tb(trace) if not _is_our_file(f.filename)]
    if frames:
        at = frames[-1]
        worker_record.report(
            ScriptExitEvent(file=at.filename, line=at.lineno or 0, function=at.name)
        )


def _record(message: str, error: BaseException) -> None:
    """Describe ``error`` in torchelastic's error file, unless ``@record`` has."""
    target = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not target or Path(target).exists():
        return
    details = {
        "py_callstack": "".join(described(error).format()),
        "timestamp": str(int(time.time())),
    }
    content = {"message": message, "extraInfo": details}
    try:
        Path(target).write_text(json.dumps({"message": content}))
    except OSError:
        return  # the traceback on stderr says the same
