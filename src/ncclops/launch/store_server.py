"""Serves torch's TCPStore on an inherited socket until the agent ends.

    python -m ncclops.launch.store_server FD HOST PORT AGENT_PID

FD is a listening socket bound to PORT. Runs until it is killed; the kernel does so when the
agent ends.
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

from ncclops import _prctl

# For this one client, which only starts the server; workers bring timeouts of their own.
_START_LIMIT = timedelta(seconds=60)


def main(arguments: list[str]) -> None:
    fd, host, port, agent_pid = arguments
    _prctl.die_with_parent(int(agent_pid), signal.SIGKILL)

    import torch.distributed

    store = torch.distributed.TCPStore(
        host,
        int(port),
        is_master=True,
        timeout=_START_LIMIT,
        wait_for_workers=False,
        master_listen_fd=int(fd),
    )
    print(f"serving on port {store.port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
