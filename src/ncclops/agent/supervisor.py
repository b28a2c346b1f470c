"""The process that the user started: it holds the run's process tree and nothing else.

    supervisor (what `ncclops launch` is, in the terminal's process group)
      └── agent (a session of its own, so that Ctrl-C reaches the supervisor alone)
            ├── store server
            └── workers, each in a session of its own

Both are subreapers and watch each other, so either may be killed with SIGKILL:
- the supervisor dies: the kernel sends the agent SIGTERM, and it stops the workers gracefully;
- the agent dies: the kernel ends the workers, and the supervisor ends the processes that they left.
Both at once: the kernel ends the workers (their parent death signal).
An agent whose event loop is held, by a file system that hangs, is ended once the run is to end.
Ctrl-Z stops the supervisor alone: the run goes on, and shows nothing until `fg`.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

from ncclops.agent.pulse import SILENT, Pulse
from ncclops.durations import format_duration
from ncclops.exhausted import advice, described
from ncclops.host import prctl, process_tree
from ncclops.process_ends import signal_name
from ncclops.record.answer import tell, within

# Passed on to the agent, which decides what they mean. SIGHUP is left ignored under nohup.
FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

# GNU `timeout` signals the launcher and then its group. A batch script's trap passes the signal of
# a terminal on, often as another one, and systemd may send SIGHUP right after SIGTERM
# (`SendSIGHUP=`). What comes so soon is the same request.
SAME_REQUEST_S = 0.5

# What an agent that died leaves behind gets this long after SIGTERM: its workers are dead by
# then, so only their helpers (loggers, uploaders) are left to flush something.
_LEFTOVER_GRACE = timedelta(seconds=6)
_LOOK_EVERY_S = 1.0
_FLUSHED_WITHIN_S = 5.0
_MOST_BYTES = 2000  # of what an agent says of its own crash


def hold(
    agent: Callable[[Pulse], int],
    *,
    handed_over: Sequence[socket.socket] = (),
    ready: Callable[[], None] = lambda: None,
    lost: Callable[[str], None] = lambda _: None,
    silent: timedelta = SILENT,
    lost_code: int = 1,
) -> int:
    """Run ``agent`` in a child process, pass signals on to it, and return its exit code.

    ``handed_over`` are the agent's from here on: were one open in this process too, its port would
    stay taken when the agent has closed it. On return not one descendant of this process is left,
    but children that it has had before and theirs: `helper & exec ncclops launch …` of a shell.
    An agent that was killed by a signal counts as exit code ``lost_code``, and is reported on
    stderr; so does one that raises. ``lost`` is called with what became of it, once its processes
    have ended. One that does not answer for ``silent`` is killed once a signal asks for the end,
    and that is the exit code's.
    ``ready`` is called once a signal sent to this process is sure to reach the agent.
    """
    before = process_tree.children()
    prctl.become_subreaper()
    supervisor_pid = os.getpid()
    # Inherited as ignored, it would never come, and neither would the agent's exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A batch script that traps SIGTERM for itself hands it on as ignored, to workers as well.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals = {s for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN}
    watched = signals | {signal.SIGCHLD}
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        watched.add(signal.SIGTSTP)
    # Blocked before the fork, so that a signal in between waits for the process that takes it next.
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    pulse = Pulse(silent)
    crash = mmap.mmap(-1, _MOST_BYTES)  # shared; a pipe would take descriptors
    ready()
    sys.stdout.flush()
    sys.stderr.flush()
    agent_pid = os.fork()
    if agent_pid == 0:
        _be_agent(agent, pulse, supervisor_pid, crash)
    for listener in handed_over:
        listener.close()
    status = _wait(agent_pid, watched, pulse)
    survivors = process_tree.end_descendants(
        _LEFTOVER_GRACE, trees_of_others=partial(process_tree.others_children, before)
    )
    if survivors:
        tell(f"ncclops: processes that SIGKILL did not end: {survivors}\n")
    if isinstance(status, signal.Signals):
        tell(
            f"ncclops: the agent has not answered for {format_duration(silent)} (a file system or a"
            " driver hangs): it was killed and its workers ended; the verdict may be missing\n"
        )
        return 128 + status
    if os.WIFSIGNALED(status):
        name = signal_name(os.WTERMSIG(status))
        tell(f"ncclops: the agent was killed by {name}; its workers were ended\n")
        lost(f"it was killed by {name}")
        return lost_code
    if why := crash[:].rstrip(b"\0"):
        lost(why.decode(errors="replace"))
        return lost_code
    return os.WEXITSTATUS(status)


def _be_agent(
    agent: Callable[[Pulse], int], pulse: Pulse, supervisor_pid: int, crash: mmap.mmap
) -> None:
    """Never returns: what runs here must not fall back into the supervisor's call stack.

    ``crash`` takes what the agent raises, as when there is no memory to load what it is made of.
    """
    code = 1
    try:
        os.setsid()
        prctl.become_subreaper()
        prctl.die_with_parent(supervisor_pid, signal.SIGTERM)
        code = agent(pulse)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the boundary of the process; told
        explained = isinstance(error, OSError) or advice(error) is not None
        what = described(error) if explained else repr(error)
        said = what.encode(errors="replace")[:_MOST_BYTES]
        crash[: len(said)] = said
        if not explained:
            import traceback

            tell(traceback.format_exc())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody reads it, or not now
                within(_FLUSHED_WITHIN_S, stream.flush)
        os._exit(code)


def _wait(agent_pid: int, watched: set[signal.Signals], pulse: Pulse) -> int | signal.Signals:
    """How the agent ended; the signal that asked for the end, where it had to be killed then."""
    asked: tuple[signal.Signals, float] | None = None
    repeats = Repeats()
    while True:
        pid, status = os.waitpid(agent_pid, os.WNOHANG | os.WUNTRACED)
        if pid == agent_pid and os.WIFSTOPPED(status):
            tell(
                f"ncclops: the agent was stopped by {signal_name(os.WSTOPSIG(status))}: workers run"
                f" on, and nothing watches them; `kill -CONT {agent_pid}` has it go on\n"
            )
        elif pid == agent_pid:
            return status
        received = _next(watched, None if asked is None else _LOOK_EVERY_S)
        if received is signal.SIGTSTP:
            _suspend(agent_pid)
            continue
        if received in _ENDING:
            if repeats.has_one():
                continue
            asked = asked or (received, time.monotonic())
            pulse.count_forwarded()
        if received is not None and received is not signal.SIGCHLD:
            os.kill(agent_pid, received)
        if received in _ENDING:
            # An agent that was stopped (SIGSTOP) would never get it.
            os.kill(agent_pid, signal.SIGCONT)
        if asked is not None and pulse.is_silent(asked[1]):
            os.kill(agent_pid, signal.SIGKILL)
            return asked[0]  # whoever waits for what is left sees to the agent as well


class Repeats:
    """Tells a signal that is sent twice for one request, maybe as another one, from a second
    request."""

    def __init__(self) -> None:
        self._asked_at = -math.inf  # when the last request came

    def has_one(self) -> bool:
        """Whether the signal to end that comes now belongs to the last request."""
        now = time.monotonic()
        if now < self._asked_at + SAME_REQUEST_S:
            return True
        self._asked_at = now
        return False


def _suspend(agent_pid: int) -> None:
    """Stop this process as Ctrl-Z does; return once it goes on. Only the terminal is let go of.

    A pause of the ranks would be a fault for those of other nodes, and for the liveness watch.
    """
    tell("ncclops: the run goes on; `fg` shows it again, `ncclops stop` ends it\n")
    os.kill(agent_pid, signal.SIGTSTP)  # which holds what it shows
    # By the default action: the kernel leaves those running that no shell could wake again.
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    os.kill(agent_pid, signal.SIGCONT)


def _next(watched: set[signal.Signals], limit_s: float | None) -> signal.Signals | None:
    """The next of these signals; None if none comes in time."""
    if limit_s is None:
        return signal.Signals(signal.sigwait(watched))
    info = signal.sigtimedwait(watched, limit_s)
    return None if info is None else signal.Signals(info.si_signo)
