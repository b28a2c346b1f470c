"""The process that the user started: it holds the run's process tree and nothing else.

    supervisor (what `ncclops launch` is, in the terminal's process group)
      └── agent (a session of its own, so that Ctrl-C reaches the supervisor alone)
            ├── store server
            └── workers, each in a session of its own

Both are subreapers and watch each other, so either may be killed with SIGKILL:
- the supervisor dies: the kernel sends the agent SIGTERM, and it stops the workers gracefully;
- the agent dies: the kernel ends the workers, and the supervisor ends the processes that they left.
Both at once: the kernel ends the workers (their parent death signal).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

from ncclops.classify.wording import signal_name
from ncclops.host import prctl, process_tree

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

# What an agent that died leaves behind gets this long after SIGTERM: its workers are dead by
# then, so only their helpers (loggers, uploaders) are left to flush something.
_LEFTOVER_GRACE = timedelta(seconds=3)


def hold(
    agent: Callable[[], int],
    *,
    handed_over: Sequence[socket.socket] = (),
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Run ``agent`` in a child process, pass signals on to it, and return its exit code.

    ``handed_over`` are the agent's from here on: were one open in this process too, its port would
    stay taken when the agent has closed it. On return not one descendant of this process is left.
    An agent that was killed by a signal counts as exit code 1, and is reported on stderr.
    ``ready`` is called once a signal sent to this process is sure to reach the agent.
    """
    prctl.become_subreaper()
    supervisor_pid = os.getpid()
    # Inherited as ignored, it would never come, and neither would the agent's exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals = {s for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN}
    watched = signals | {signal.SIGCHLD}
    # Blocked before the fork, so that a signal in between waits for the process that takes it next.
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    ready()
    sys.stdout.flush()
    sys.stderr.flush()
    agent_pid = os.fork()
    if agent_pid == 0:
        _be_agent(agent, supervisor_pid)
    for listener in handed_over:
        listener.close()
    status = _wait(agent_pid, watched)
    survivors = process_tree.end_descendants(_LEFTOVER_GRACE)
    if survivors:
        sys.stderr.write(f"ncclops: processes that SIGKILL did not end: {survivors}\n")
    if os.WIFSIGNALED(status):
        name = signal_name(os.WTERMSIG(status))
        sys.stderr.write(f"ncclops: the agent was killed by {name}; its workers were ended\n")
        return 1
    return os.WEXITSTATUS(status)


def _be_agent(agent: Callable[[], int], supervisor_pid: int) -> None:
    """Never returns: what runs here must not fall back into the supervisor's call stack."""
    code = 1
    try:
        os.setsid()
        prctl.become_subreaper()
        prctl.die_with_parent(supervisor_pid, signal.SIGTERM)
        code = agent()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except OSError as error:  # no memory, no processes, no space: a traceback would not explain it
        sys.stderr.write(f"ncclops: error: the agent crashed: {error}\n")
    except BaseException:  # noqa: BLE001 - the boundary of the process; shown, then exit 1
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(agent_pid: int, watched: set[signal.Signals]) -> int:
    while True:
        pid, status = os.waitpid(agent_pid, os.WNOHANG)
        if pid == agent_pid:
            return status
        received = signal.sigwait(watched)
        if received is not signal.SIGCHLD:
            os.kill(agent_pid, received)
        if received in _ENDING:
            # An agent that was stopped (SIGSTOP) would never get it.
            os.kill(agent_pid, signal.SIGCONT)
