"""Ties a worker to its agent: when the agent ends, by whatever means, the kernel ends the worker.

Also a command, for programs that are not Python (``ncclops launch --no-python``):

    python -m ncclops.worker.parent_death PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import os
import signal
import sys

from ncclops.host.prctl import die_with_parent
from ncclops.record.variables import AGENT_PID, COMMANDS_FD


def tie_to_agent() -> None:
    """Die with the agent that started this process; does nothing outside `launch`.

    SIGKILL, because no process is left that could follow up if a handler for SIGTERM hangs, and a
    worker that hangs unseen keeps its GPU.
    """
    agent_pid = os.environ.pop(AGENT_PID, None)
    if agent_pid is not None:
        die_with_parent(int(agent_pid), signal.SIGKILL)


if __name__ == "__main__":
    tie_to_agent()
    if (commands := os.environ.pop(COMMANDS_FD, None)) is not None:
        os.close(int(commands))  # no program other than ours knows what to do with it
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, not by other programs
        signal.signal(number, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
