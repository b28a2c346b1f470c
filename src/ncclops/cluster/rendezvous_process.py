"""The process that uses the job's store on behalf of an agent: torch's rendezvous, and the log.

    python -m ncclops.cluster.rendezvous_process FD CONFIG

A separate process, because torch's rendezvous imports torch and blocks for as long as nodes are
missing, while the agent has signals to answer and workers to watch. It exchanges JSON lines with
the agent over the socket FD. When the agent's side of the socket closes, the agent has ended: this
process records that for the other nodes, and ends. With a third argument all of torch is imported,
where otherwise only what the rendezvous needs is.

What they say is in ``cluster.messages``, what is in the store in ``records`` and ``store_values``.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from ncclops.cluster import messages, store_values
from ncclops.cluster.records import LostRecord, Record
from ncclops.cluster.rendezvous_backends import StaticBackend, TorchBackend, load_part_of_torch
from ncclops.cluster.rendezvous_link import Config, Link, NotNeeded, Refused, first_line
from ncclops.cluster.round_member import RoundMember
from ncclops.cluster.store_values import JobClaim, NodeFacts
from ncclops.host import prctl

log = logging.getLogger("ncclops.cluster.rendezvous_process")  # it is __main__

_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# How long recording that the agent has ended may take, before this process ends anyway.
_RECORD_END_WITHIN_S = 6.0


class RendezvousProcess:
    """Serves the agent at the other end of the socket ``agent``."""

    def __init__(self, config: Config, agent: socket.socket) -> None:
        self._agent = agent
        self._link = Link(config, agent)
        self._commands: queue.Queue[messages.Meet | messages.Post | messages.Leave] = queue.Queue()
        self._round: RoundMember | None = None
        self._backend: StaticBackend | TorchBackend  # once connected
        self._meets = threading.Lock()  # around the two below
        self._is_meeting = False
        self._is_to_leave = False

    def follow_agent(self) -> None:
        """Read its commands from now on, and end with it.

        Connecting is tried for as long as ``join_timeout``: without its agent, this process would
        reach the store of a later job meanwhile, and name the job there.
        """
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()

    def connect(self) -> None:
        """Raise ``Refused`` where the store does not answer, or the job's name is another one's."""
        self._agree_on_job()
        static = self._link.config.backend == "static"
        self._backend = StaticBackend(self._link) if static else TorchBackend(self._link)

    def run(self) -> None:
        """Serve the agent until it leaves or ends; does not return in the latter case."""
        while True:
            match self._commands.get():
                case messages.Meet(attempt, facts):
                    self._meet(attempt, facts)
                case messages.Post(record):
                    if self._round is not None:
                        self._post(self._round, record)
                case messages.Leave(over):
                    if self._round is not None:
                        self._round.over.set()
                    if over:
                        self._backend.close()
                    else:
                        self._backend.leave()
                    return

    def _agree_on_job(self) -> None:
        """Raise ``Refused`` where nodes expect jobs of different sizes: they would never meet.

        Or where they run different scripts: they would train together.
        """
        config = self._link.config
        try:
            store = self._link.connect()
            mine = JobClaim(
                name=config.name,
                pid=config.launcher,
                at=time.time(),
                run_dir=config.run_dir,
                nnodes=config.nnodes,
                script=config.script,
            )
            encoded = store_values.encode(mine)
            stored = store.compare_set(f"ncclops/{config.job_id}/nnodes", "", encoded)
        except RuntimeError as error:
            raise Refused(
                f"the store at {config.host} port {config.port} does not answer"
                f" ({first_line(error)})"
            ) from None
        self._link.send(messages.Connected())
        agreed = store_values.decode(stored, JobClaim)
        if agreed is None:
            raise Refused(
                f"another version of ncclops has begun job {config.job_id} in this store: install"
                " the same on all nodes, and give each job in a store its own --rdzv-id"
            )
        self._link.first = str(agreed)
        if agreed.nnodes != config.nnodes:
            raise Refused(
                f"--nnodes {config.nnodes} here, but {agreed.nnodes} on {agreed}: give all"
                f" nodes of job {config.job_id} the same, and each job in a store its own --rdzv-id"
            )
        if agreed.script and config.script not in ("", agreed.script):
            raise Refused(
                f"{config.script} here, but job {config.job_id} in this store runs {agreed.script}"
                f" on {agreed}: give each job in a store its own --rdzv-id (or"
                " --allow-difference script, where its nodes run different ones)"
            )

    # --- commands -------------------------------------------------------------------------------

    def _meet(self, attempt: int, facts: NodeFacts) -> None:
        if self._round is not None:
            self._round.over.set()
        try:
            with self._meeting():
                met = self._backend.meet(attempt)
            self._round = met
            met.begin(facts)
        except NotNeeded:
            self._link.send(messages.Unneeded())
        except Refused as refused:
            self._link.send(messages.NoRound(str(refused)))
        except RuntimeError as error:  # torch's store errors are
            self._link.send(messages.StoreLost(first_line(error)))
        except Exception as error:
            log.exception("attempt %d", attempt)
            self._link.send(messages.NoRound(f"{type(error).__name__}: {error}"))

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        with self._meets:
            self._is_meeting = True
            if self._is_to_leave:
                self._leave_in_a_meeting()
        try:
            yield
        finally:
            with self._meets:
                self._is_meeting = False

    def _leave_in_a_meeting(self) -> NoReturn:
        """End this process, which would wait for other nodes for as long as they like.

        The job is not closed to them: they may train already, and this node be a spare.
        """
        try:
            self._backend.leave()
        finally:
            os._exit(0)

    def _post(self, current: RoundMember, record: Record) -> None:
        try:
            current.log.post(record)
        except RuntimeError as error:
            self._link.send(messages.StoreLost(first_line(error)))

    # --- the agent's end ----------------------------------------------------------------------

    def _read_commands(self) -> None:
        with self._agent.makefile("rb") as lines:
            for line in lines:
                command = messages.decode_command(line)
                self._commands.put(command)
                if isinstance(command, messages.Leave):
                    with self._meets:
                        self._is_to_leave = True
                        if self._is_meeting:
                            self._leave_in_a_meeting()
        self._record_end()

    def _record_end(self) -> None:
        threading.Timer(_RECORD_END_WITHIN_S, os._exit, (1,)).start()
        current = self._round
        if current is not None and not current.over.is_set():
            why = "its agent was killed, and its workers with it"
            with suppress(RuntimeError):  # the store has gone with the agent that served it
                current.final_log.post(LostRecord(node=current.rank, why=why, by=current.rank))
        os._exit(0)


def main(arguments: list[str]) -> None:
    fd, config = int(arguments[0]), Config(**json.loads(arguments[1]))
    # This process ends when its agent does. A signal sent to all descendants of the agent must not
    # keep it from recording that for the other nodes, and one to all of the job is for the workers.
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    agent = socket.socket(fileno=fd)
    # Until it follows the agent over the socket. The import of torch takes seconds.
    prctl.signal_at_parent_s_end(signal.SIGKILL)
    if _has_ended(agent):
        return
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # nodes.log
    if config.backend != "static" and len(arguments) == 2:
        try:
            load_part_of_torch()
        except Exception:
            log.exception("torch's rendezvous needs more of this torch: all of it is imported")
            module = "ncclops.cluster.rendezvous_process"
            os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments, "all"])
    try:
        process = RendezvousProcess(config, agent)
        process.follow_agent()
        prctl.signal_at_parent_s_end(None)
        process.connect()
    except Exception as error:
        log.error("no part in the job: %s", error, exc_info=not isinstance(error, Refused))
        agent.sendall(messages.encode(messages.NoRound(first_line(error))))
    else:
        process.run()
    # Threads still wait for the agent, and in torch's store. One that comes back while the
    # interpreter ends would have the process end by SIGABRT.
    os._exit(0)


def _has_ended(agent: socket.socket) -> bool:
    try:
        return agent.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except OSError:  # nothing has come yet
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
