"""Serves torch's TCPStore on an inherited socket until the agent ends.

    python -m ncclops.agent.store_server FD PORT AGENT_PID

FD is a listening socket bound to PORT. Runs until it is killed; the kernel does so when the
agent ends. The server itself is the restart core's, which loads as little of torch as it needs.
"""

from __future__ import annotations

import signal
import sys

from ncclops.host import prctl
from ncclops.restart.store_server import load_tcp_store, serve_until_killed


def main(arguments: list[str]) -> None:
    fd, port, agent_pid = map(int, arguments)
    prctl.die_with_parent(agent_pid, signal.SIGKILL)
    serve_until_killed(fd, port, load_tcp_store())


if __name__ == "__main__":
    main(sys.argv[1:])
