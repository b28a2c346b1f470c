"""The process that ranks are forked from: it imports torch once, and has no thread.

A packet on its socket names the file with a pickled ``RankOrder`` and brings the rank's end of a
channel. Each rank gets a parent of its own, its keeper, which alone may wait for it: it reports the
rank's end on the same channel, and ends the rank when the harness is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from ncclops.testing import _processes, _rank
from ncclops.testing._channel import Channel
from ncclops.testing._order import RankOrder
from ncclops.testing.errors import HarnessError
from ncclops.testing.interpreter import Interpreter

# torch on a cold disk of a busy machine.
_READY_WITHIN_S = 180.0


class ForkServer:
    """The process, as the harness sees it; one serves any number of jobs.

    Started with the first rank, as a process of ``interpreter``. Raises ``HarnessError`` if it does
    not come up.
    """

    def __init__(self, interpreter: Interpreter | None = None) -> None:
        self.interpreter = Interpreter() if interpreter is None else interpreter
        self._end: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, order: RankOrder, channel: socket.socket) -> None:
        """Start a rank, which gets ``channel`` as its end."""
        end = self._end if self._end is not None else self._start()
        path = order.directory / f"order-{order.rank}"
        path.write_bytes(pickle.dumps(order))
        socket.send_fds(end, [str(path).encode()], [channel.fileno()])

    def close(self) -> None:
        """End the process. Ranks go on."""
        if self._end is not None and self._process is not None:
            self._end.close()
            self._process.kill()
            self._process.wait()
        self._end = self._process = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as output:
            command = f"from {__name__} import serve; serve({theirs.fileno()})"
            environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "error", **os.environ}
            environment |= self.interpreter.environment
            places = list(map(os.path.abspath, filter(None, sys.path)))
            environment["PYTHONPATH"] = os.pathsep.join(self.interpreter.path(places))
            self._process = subprocess.Popen(
                [self.interpreter.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
            theirs.close()
            ours.settimeout(_READY_WITHIN_S)
            try:
                ready = ours.recv(1)
            except TimeoutError:
                ready = b""
            if not ready:
                self._process.kill()
                self._process.wait()
                ours.close()
                output.seek(0)
                said = output.read().decode(errors="replace").strip().splitlines()
                raise HarnessError(
                    "the process that ranks are forked from did not come up: "
                    f"{said[-1] if said else 'it said nothing'}; does "
                    f"`{self.interpreter.executable} -c 'import torch.distributed'` work?"
                )
        self._end = ours
        return ours


# --- in the process -----------------------------------------------------------------------------


def serve(number: int) -> None:
    """Fork a rank for each packet, until the harness is gone."""
    _rank.prepare()
    # torch looks up the name of 127.0.0.1 at each connection: 5 s where no name server answers
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    with socket.socket(fileno=number) as end:
        end.send(b"r")
        while True:
            name, descriptors, _, _ = socket.recv_fds(end, 4096, 1)
            if not name:
                return
            if os.fork() == 0:
                end.close()
                _keep(pickle.loads(Path(name.decode()).read_bytes()), descriptors[0])
            os.close(descriptors[0])


def _keep(order: RankOrder, number: int) -> None:
    """Fork the rank and wait for its end."""
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel = Channel(socket.socket(fileno=number), order.directory)
        if (rank := os.fork()) == 0:
            _rank.run(order, channel)
        channel.send({"op": "started", "pid": rank})
        code = _wait(order, rank, channel)
        channel.send({"op": "ended", "code": code})
    except OSError:
        pass  # the harness is gone
    finally:
        os._exit(0)


def _wait(order: RankOrder, rank: int, channel: Channel) -> int:
    """The exit code; a harness that goes takes the rank with it, and all that it has started."""
    poll = select.poll()
    ended = os.pidfd_open(rank)
    poll.register(ended, select.POLLIN)
    poll.register(channel, 0)  # says when the other end is closed, and reads nothing
    events = dict(poll.poll())
    if ended not in events:
        tag, _, _ = order.environment[_processes.TAG].rpartition(":")
        _processes.vanish({rank} | _processes.of_rank(tag, order.rank, rank))
    return os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
