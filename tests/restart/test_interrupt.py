"""Interrupting a thread of this very process, wherever it is."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest

from ncclops.restart import progress_watchdog
from ncclops.restart._interrupt import main_thread as _interrupt
from ncclops.restart._interrupt.main_thread import Interrupter, wake_signal
from ncclops.restart.exception import RankShouldRestart

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")


@contextlib.contextmanager
def interrupted(
    fn: Callable[[Interrupter], object],
    patience_s: float = 30.0,
    unblock: Callable[[FrameType], None] = lambda _frame: None,
    abort: Callable[[Interrupter], None] = lambda _interrupter: None,
) -> Iterator[list[str]]:
    """Run ``fn`` in this thread until a monitor thread gets it out; yields what happened."""
    happened: list[str] = []
    interrupter = Interrupter(threading.get_ident(), 0.05, patience_s)
    wake = wake_signal()
    started = threading.Event()

    def monitor() -> None:
        assert started.wait(30)
        time.sleep(0.1)  # into the middle of whatever fn does
        with interrupter.ending():
            happened.append("begun")
            abort(interrupter)
            interrupter.interrupt(wake, unblock)

    thread = threading.Thread(target=monitor)
    thread.start()
    escaped: BaseException | None = None
    interrupter.arm()
    try:
        try:
            started.set()
            fn(interrupter)
            happened.append("returned")
        finally:
            interrupter.armed = False
    except BaseException as error:  # noqa: BLE001 - sorted out below
        escaped = error
    interrupter.settle()
    thread.join(30)
    if isinstance(escaped, RankShouldRestart):
        happened.append("interrupted")
    elif escaped is not None:
        raise escaped
    assert not thread.is_alive()
    # anything that is still pending would land here
    for _ in range(10_000):
        pass
    time.sleep(0.02)
    yield happened


def spin(_: Interrupter) -> None:
    while True:
        pass


def sleep(_: Interrupter) -> None:
    time.sleep(1000)


def wait_for_a_lock(_: Interrupter) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def swallow(_: Interrupter) -> None:
    while True:
        with contextlib.suppress(BaseException):
            while True:
                pass


def swallow_a_few_times(interrupter: Interrupter) -> None:
    for _ in range(3):
        try:
            while True:
                time.sleep(0.001)
        except BaseException:  # noqa: BLE001 - that is the point
            continue
    while True:
        pass


class Stubborn:
    def __del__(self) -> None:
        time.sleep(0.2)


def collect(interrupter: Interrupter) -> None:
    while True:
        Stubborn()
        for _ in range(2_000_000):
            pass


@pytest.mark.parametrize("fn", [spin, sleep, wait_for_a_lock, swallow_a_few_times, collect])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_out_exactly_once(fn: Callable[[Interrupter], object]) -> None:
    with interrupted(fn) as happened:
        assert happened == ["begun", "interrupted"]
    gc.collect()


def test_a_function_that_swallows_it_in_a_loop_is_overdue_once_clean_up_has_had_its_time() -> None:
    overdue = threading.Event()

    def swallow_until_overdue(interrupter: Interrupter) -> None:
        assert not interrupter.is_overdue

        def look() -> None:
            while not overdue.is_set() and interrupter.armed:
                if interrupter.is_overdue:
                    overdue.set()

        threading.Thread(target=look, daemon=True).start()
        while not overdue.is_set():
            with contextlib.suppress(BaseException):
                overdue.wait()
        spin(interrupter)

    with interrupted(swallow_until_overdue, patience_s=0.05) as happened:
        assert happened == ["begun", "interrupted"]
    assert overdue.is_set()


@pytest.mark.parametrize("fn", [sleep, wait_for_a_lock])
def test_a_wait_is_ended_at_the_first_attempt(
    fn: Callable[[Interrupter], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_interrupt, "_FIRST_PAUSE_S", 1.0)  # this machine may be slow
    further_attempts: list[FrameType] = []
    for _ in range(5):
        further_attempts.clear()
        with interrupted(fn, unblock=further_attempts.append) as happened:
            assert happened == ["begun", "interrupted"]
        if not further_attempts:
            break  # in others the thread may not have come to its wait yet
    assert not further_attempts


def test_code_that_only_runs_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """C code may not expect that a system call ends early."""
    monkeypatch.setattr(_interrupt, "_FIRST_PAUSE_S", 30.0)

    def compute(_: Interrupter) -> None:
        while True:  # in C, without the GIL
            hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 500_000)

    wake, received = wake_signal(), []
    assert wake is not None
    before = signal.signal(wake, lambda number, _: received.append(number))
    try:
        for _ in range(5):
            with interrupted(compute) as happened:
                assert happened == ["begun", "interrupted"]
    finally:
        signal.signal(wake, before)
    assert received == []


def test_nothing_runs_after_a_wait_that_ends_without_an_error() -> None:
    """As the abort of an NCCL group ends a wait for the device."""
    went_on = []

    for number in range(50):
        device = threading.Lock()
        device.acquire()

        def wait(_: Interrupter, device: threading.Lock = device, number: int = number) -> None:
            device.acquire()
            went_on.append(number)

        def abort(interrupter: Interrupter, device: threading.Lock = device) -> None:
            interrupter.raise_ahead()
            device.release()
            time.sleep(0.005)  # it takes a moment more, for other groups

        with interrupted(wait, abort=abort) as happened:
            assert happened == ["begun", "interrupted"]
    assert went_on == []


def cleaning_up(steps: list[int], count: int, pause_s: float) -> Callable[[Interrupter], None]:
    """Runs until it is interrupted, and then takes ``count`` steps, noted in ``steps``."""

    def run(_: Interrupter) -> None:
        try:
            while True:
                pass
        finally:
            for step in range(count):
                time.sleep(pause_s)
                steps.append(step)

    return run


def test_what_is_raised_ahead_is_not_raised_again_during_clean_up() -> None:
    steps: list[int] = []
    with interrupted(cleaning_up(steps, 20, 0.01), abort=Interrupter.raise_ahead) as happened:
        assert happened == ["begun", "interrupted"]
    assert steps == list(range(20))


def test_what_is_raised_ahead_is_raised_again_where_it_was_swallowed() -> None:
    with interrupted(swallow_a_few_times, abort=Interrupter.raise_ahead) as happened:
        assert happened == ["begun", "interrupted"]


def test_a_delicate_place_is_not_cut_ahead_of_an_abort() -> None:
    freed = []

    class Slow:
        def __del__(self) -> None:
            for _ in range(50):
                time.sleep(0.01)
            freed.append(True)

    def free(_: Interrupter) -> None:
        Slow()
        while True:
            pass

    with interrupted(free, abort=Interrupter.raise_ahead) as happened:
        assert happened == ["begun", "interrupted"]
    assert freed == [True]


def test_an_abort_that_is_late_does_not_interrupt_the_next_iteration() -> None:
    interrupter = Interrupter(threading.get_ident(), 0.05, 1)
    with interrupter.ending():
        pass
    interrupter.arm()
    interrupter.raise_ahead()
    for _ in range(10_000):
        pass
    interrupter.armed = False
    interrupter.settle()


def test_clean_up_that_waits_for_something_that_does_not_come_is_interrupted_as_well() -> None:
    """As ``with ThreadPoolExecutor()`` does, where one of its threads goes on."""

    def wait_in_clean_up(_: Interrupter) -> None:
        try:
            while True:
                pass
        finally:
            threading.Event().wait(1000)

    with interrupted(wait_in_clean_up, patience_s=1000) as happened:
        assert happened == ["begun", "interrupted"]


def test_clean_up_that_moves_is_not_disturbed_however_long_it_takes() -> None:
    steps: list[int] = []
    with interrupted(cleaning_up(steps, 80, 0.05), patience_s=1000) as happened:
        assert happened == ["begun", "interrupted"]
    assert steps == list(range(80))


def test_what_python_ignores_while_it_frees_a_generator_is_raised_after_that() -> None:
    def samples() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            time.sleep(0.005)  # where the function nearly always is

    def take_one_at_a_time(_: Interrupter) -> None:
        while True:
            for _sample in samples():
                break

    hook = sys.unraisablehook
    with interrupted(take_one_at_a_time) as happened:
        assert happened == ["begun", "interrupted"]
    assert sys.unraisablehook is hook


def test_a_context_manager_is_entered_and_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interrupt, "_BRIEFLY_S", 30.0)  # this machine may be slow

    class Counted:
        inside = 0

        def __enter__(self) -> None:
            self.inside += 1
            time.sleep(0.01)

        def __exit__(self, *_: object) -> None:
            time.sleep(0.01)
            self.inside -= 1

    manager = Counted()

    def use(_: Interrupter) -> None:
        while True:
            with manager:
                time.sleep(0.01)

    for _ in range(8):
        with interrupted(use) as happened:
            assert happened == ["begun", "interrupted"]
        assert manager.inside == 0


def test_a_context_manager_that_waits_is_interrupted() -> None:
    class Waiting:
        def __enter__(self) -> None:
            threading.Event().wait(1000)

        def __exit__(self, *_: object) -> None:
            pass

    def use(_: Interrupter) -> None:
        with Waiting():
            pass

    with interrupted(use, patience_s=1000) as happened:
        assert happened == ["begun", "interrupted"]


def test_a_module_is_imported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has registered outlives an import that was cut short, and cannot be made twice."""
    (tmp_path / "registering.py").write_text(
        "import sys, time\n"
        "assert 'registered' not in sys.modules\n"
        "sys.modules['registered'] = sys\n"
        "for _ in range(30): time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "registered", raising=False)

    def use(_: Interrupter) -> None:
        importlib.import_module("registering")
        time.sleep(1000)

    for _ in range(2):
        with interrupted(use) as happened:
            assert happened == ["begun", "interrupted"]
    del sys.modules["registering"], sys.modules["registered"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_process_that_is_being_started_is_known() -> None:
    """An interruption just after the fork would leave a child of which nothing knows."""
    before = {child.pid for child in psutil.Process().children()}
    known: list[int | None] = []

    def start(_: Interrupter) -> None:
        while True:
            process = FORK.Process(target=time.sleep, args=(600,))
            process.start()
            known.append(process.pid)
            process.kill()
            process.join()

    for _ in range(15):
        with interrupted(start) as happened:
            assert happened == ["begun", "interrupted"]
    for child in multiprocessing.active_children():  # of the last round of each
        child.kill()
        child.join()
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.parametrize("make", [FORK.Pool, FORK.Manager], ids=["pool", "manager"])
def test_a_pool_or_manager_that_is_being_started_can_be_ended(
    make: Callable[[], contextlib.AbstractContextManager[object]],
) -> None:
    """Its processes run before there is anything that ends them."""
    before = {child.pid for child in psutil.Process().children()}

    def start(_: Interrupter) -> None:
        while True:
            with make():
                pass
            time.sleep(0.005)

    for _ in range(10):
        with interrupted(start) as happened:
            assert happened == ["begun", "interrupted"]
    gc.collect()
    left = {child.pid for child in psutil.Process().children()} - before
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    assert not left


def test_a_signal_that_c_code_handles_is_left_to_it() -> None:
    """``signal.getsignal`` knows nothing of such a handler."""
    program = """
import ctypes, signal
from ncclops.restart._interrupt.main_thread import wake_signal
first = signal.SIGRTMIN + 5
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
ctypes.CDLL(None).signal(first, handler)
assert signal.getsignal(first) == signal.SIG_DFL
assert wake_signal() == first + 1, wake_signal()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_debugger_or_profiler_can_run_after_an_iteration() -> None:
    """Python up to 3.12 does not get on where an exception is taken back that was to be raised."""
    program = """
import sys, threading
from ncclops.restart._interrupt.main_thread import Interrupter
interrupter = Interrupter(threading.get_ident(), 0.05, 1)
interrupter.arm()
interrupter.armed = False
interrupter.settle()
called = []
sys.settrace(lambda frame, event, _: called.append(frame.f_code.co_name))
for _ in range(50):
    interrupter.arm()
sys.settrace(None)
assert called.count("arm") == 50, called
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_clean_up_is_not_disturbed() -> None:
    done = []

    def clean_up_slowly(_: Interrupter) -> None:
        try:
            while True:
                pass
        finally:
            for step in range(50):
                time.sleep(0.01)
                done.append(step)

    with interrupted(clean_up_slowly) as happened:
        assert happened[-1] == "interrupted"
    assert done == list(range(50))


def test_clean_up_that_lasts_too_long_is_interrupted_as_well() -> None:
    def clean_up_for_ever(_: Interrupter) -> None:
        try:
            while True:
                pass
        finally:
            time.sleep(1000)

    with interrupted(clean_up_for_ever, patience_s=0.2) as happened:
        assert happened[-1] == "interrupted"


def test_an_exception_made_of_it_is_still_a_restart_in_progress() -> None:
    def convert(_: Interrupter) -> None:
        try:
            try:
                while True:
                    pass
            except BaseException as error:
                raise ValueError("converted") from error
        finally:
            time.sleep(0.3)

    with pytest.raises(ValueError, match="converted"), interrupted(convert):
        pass


def test_an_atomic_section_is_waited_for() -> None:
    order: list[str] = []

    def work(interrupter: Interrupter) -> None:
        with interrupter.atomic(), interrupter.atomic():
            time.sleep(0.4)
            order.append("section")
        while True:
            pass

    with interrupted(work) as happened:
        assert order == ["section"]
        assert happened == ["begun", "interrupted"]


def test_no_atomic_section_is_entered_once_it_has_begun() -> None:
    begun = threading.Event()  # set where no section is under way, and none may be entered
    entered = []

    def keep_entering(interrupter: Interrupter) -> None:
        while True:
            with interrupter.atomic():
                entered.append(begun.is_set())

    def begin(_: Interrupter) -> None:
        begun.set()
        time.sleep(0.1)  # time to enter one, if that were possible

    with interrupted(keep_entering, abort=begin) as happened:
        assert happened == ["begun", "interrupted"]
    assert entered
    assert not any(entered)


def test_sections_that_follow_each_other_at_once_do_not_put_it_off(tmp_path: Path) -> None:
    ended = time.monotonic() + 20

    def save_again_and_again(interrupter: Interrupter) -> None:
        while time.monotonic() < ended:
            with interrupter.atomic():
                for number in range(100):
                    (tmp_path / "checkpoint").write_text(str(number))

    with interrupted(save_again_and_again) as happened:
        assert happened == ["begun", "interrupted"]


class NoOutput(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        pass


@pytest.mark.parametrize("what", ["handler", "module", "fork"])
def test_no_lock_that_other_threads_need_stays_held(what: str) -> None:
    """The monitor thread logs, too: it would wait for a lock of logging for ever."""
    handler, record = NoOutput(), logging.makeLogRecord({})

    def fork() -> None:
        """Python takes and releases logging's locks around it."""
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)

    acts: dict[str, Callable[[], object]] = {
        "handler": lambda: handler.handle(record),
        "module": lambda: logging.getLogger("some"),
        "fork": fork,
    }

    def go_on(_: Interrupter) -> None:
        while True:
            acts[what]()

    def look() -> None:
        assert handler.lock is not None
        with handler.lock:
            logging.getLogger("some")

    for _ in range(25):
        with interrupted(go_on) as happened:
            assert happened == ["begun", "interrupted"]
        other = threading.Thread(target=look, daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive()


def test_a_section_that_outlives_its_iteration_does_not_harm_the_next() -> None:
    interrupter = Interrupter(threading.get_ident(), 0.05, 1)
    interrupter.arm()
    old = interrupter.atomic()
    old.__enter__()
    interrupter.armed = False
    interrupter.settle()
    interrupter.arm()
    old.__exit__(None, None, None)
    with interrupter.atomic():
        pass
    interrupter.armed = False
    interrupter.settle()


def test_where_it_was_suppressed_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ncclops.restart")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.DEBUG)
    try:
        with interrupted(swallow_a_few_times):
            pass
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.NOTSET)
    assert "swallow_a_few_times" in caplog.text


def test_the_prototypes_of_others_stay_as_they_were() -> None:
    """``ctypes.pythonapi`` is shared: recipes that call the same functions have their own types."""
    assert progress_watchdog.MainThreadHeartbeat is not None
    for name in ("PyThreadState_SetAsyncExc", "Py_AddPendingCall"):
        assert getattr(ctypes.pythonapi, name).argtypes is None, name


def test_nothing_is_raised_into_a_thread_that_is_out_already() -> None:
    with interrupted(lambda _: None) as happened:
        assert happened == ["returned", "begun"] or happened == ["begun", "returned"]
