"""The process of a fork server, as the agent starts it.

Its imports take longer than all else at the start of a run, so that an agent starts it before it
imports what it consists of itself. This module therefore imports little.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from ncclops.agent.job import Job
from ncclops.record import variables
from ncclops.record.fork_messages import FORK_SERVER_FD, FORK_SERVER_IMPORTS
from ncclops.record.regular_file import append_regular


class ForkServerProcess:
    """A server that has begun to import, with the command line and ``environ`` of a worker.

    ``socket`` is the agent's end of what they talk over. It ends with the process that has made
    this. Raises ``OSError``.
    """

    def __init__(self, job: Job, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started = {
            variables.AGENT_PID: str(os.getpid()),
            FORK_SERVER_FD: str(theirs.fileno()),
            FORK_SERVER_IMPORTS: json.dumps(job.warm_imports),
        }
        try:
            with theirs, append_regular(job.run.paths.fork_server_log) as output:
                self.process = subprocess.Popen(
                    job.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**environ, **started},
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            self.socket.close()
            raise


def start_first(job: Job) -> ForkServerProcess | None:
    """The server of the first attempt; None: there is to be none, or it could not be started.

    The agent tries the latter once more, when it has a log for the reason.
    """
    if job.warm_imports is not None:
        with suppress(OSError):
            return ForkServerProcess(job, job.environ_of(0))
    return None
