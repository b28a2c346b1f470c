"""The process that speaks with the job's store for an agent: torch's rendezvous, and the log.

    python -m ncclops.cluster.rendezvous_process FD CONFIG

A process of its own, because torch's rendezvous blocks for as long as nodes are missing and takes
torch with it, while the agent has signals to answer and workers to watch. It talks with the agent
in JSON lines over the socket FD, and outlives it by a moment: the end of the agent's side of the
socket is the end of the agent, and this process tells the others so.

From the agent (``op``):  ``meet`` (attempt, facts), ``post`` (record), ``leave`` (over)
To the agent (``is``):    ``connected``, ``waiting`` (here, begun), ``met`` (rank, size),
                          ``gathered`` (facts; on rank 0), ``record`` (record), ``tick``,
                          ``store-lost`` (why), ``failed`` (why), ``not-needed``
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
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ncclops.cluster import messages
from ncclops.cluster.heartbeat import PulseWatch, watched_by
from ncclops.cluster.shared_log import Record, SharedLog, is_lost
from ncclops.cluster.statuses import Statuses

log = logging.getLogger("ncclops.cluster.rendezvous_process")  # it is __main__

# How long we may take to tell the others that our agent is gone, before we go as well.
_LAST_WORDS_S = 3.0
# Between two looks at who is there. Torch's rendezvous keeps that in one value that changes with
# each heartbeat: there is no key to wait for.
_LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the agent tells at the start; times in seconds. See ``rendezvous.RendezvousConfig``."""

    backend: str
    host: str
    port: int
    job_id: str
    active: int
    most: int
    rank: int | None
    name: str
    run_dir: str
    join_s: float
    last_call_s: float
    beat_s: float
    missed_beats: int

    @property
    def nnodes(self) -> str:
        """The size of the job, as ``--nnodes`` has it."""
        return f"{self.active}:{self.most}" if self.most > self.active else str(self.active)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Refused(Exception):
    """No round came about; the message says why, for people."""


class _NotNeeded(Exception):
    """The job has ended without this node having taken part."""


class Member:
    """One node's side of the store. ``agent`` is the socket to its agent."""

    def __init__(self, config: Config, agent: socket.socket) -> None:
        self._config = config
        self._agent = agent
        self._sending = threading.Lock()
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self._tcp_store = _tcp_store_class(config.backend)
        self._agree_on_size()
        self._assembly = _Static(self) if config.backend == "static" else _Dynamic(self)
        self._round: _Round | None = None

    @property
    def config(self) -> Config:
        return self._config

    def run(self) -> None:
        """Serve the agent until it leaves or ends; does not return in the latter case."""
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        while True:
            order = self._orders.get()
            match order["op"]:
                case "meet":
                    self._meet(order["attempt"], order["facts"])
                case "post" if self._round is not None:
                    self._post(self._round, order["record"])
                case "leave":
                    if self._round is not None:
                        self._round.over.set()
                    if order["over"]:
                        self._assembly.close()
                    return

    def connect(self) -> Any:
        """Another connection to the store; a blocking ``wait`` occupies the one it is called on."""
        limit = timedelta(seconds=self._config.join_s)
        return self._tcp_store(
            self._config.host, self._config.port, None, False, limit, wait_for_workers=False
        )

    def tell(self, message: messages.Message) -> None:
        """Send ``message`` to the agent."""
        line = messages.encode(message)
        with self._sending:
            try:
                self._agent.sendall(line)
            except OSError:
                return  # it has gone, and ``_listen`` is about to see it

    def _agree_on_size(self) -> None:
        """Raise ``Refused`` where nodes were told of jobs of different sizes, which never meet."""
        config = self._config
        try:
            store = self.connect()
            mine = f"{config.nnodes} {config.name}"
            agreed = store.compare_set(f"ncclops/{config.job_id}/nnodes", "", mine).decode()
        except RuntimeError as error:
            raise Refused(
                f"the store at {config.host} port {config.port} does not answer"
                f" ({_first_line(error)})"
            ) from None
        self.tell(messages.Connected())
        theirs, _, name = agreed.partition(" ")
        if theirs != config.nnodes:
            raise Refused(
                f"--nnodes {config.nnodes} here, but {theirs} on {name}: give all nodes of job"
                f" {config.job_id} the same, and each job in a store its own --rdzv-id"
            )

    # --- orders -------------------------------------------------------------------------------

    def _meet(self, attempt: int, facts: Record) -> None:
        if self._round is not None:
            self._round.over.set()
        try:
            self._round = self._assembly.meet(attempt)
            self._round.begin(facts)
        except _NotNeeded:
            self.tell(messages.Unneeded())
        except Refused as refused:
            self.tell(messages.NoRound(str(refused)))
        except RuntimeError as error:  # torch's store errors are
            self.tell(messages.StoreLost(_first_line(error)))
        except Exception as error:
            log.exception("attempt %d", attempt)
            self.tell(messages.NoRound(f"{type(error).__name__}: {error}"))

    def _post(self, current: _Round, record: Record) -> None:
        try:
            current.log.post(record)
        except RuntimeError as error:
            self.tell(messages.StoreLost(_first_line(error)))

    # --- the agent's end ----------------------------------------------------------------------

    def _listen(self) -> None:
        with self._agent.makefile("rb") as lines:
            for line in lines:
                self._orders.put(json.loads(line))
        self._last_words()

    def _last_words(self) -> None:
        threading.Timer(_LAST_WORDS_S, os._exit, (1,)).start()
        current = self._round
        if current is not None and not current.over.is_set():
            why = "its agent was killed, and its workers with it"
            last = {"kind": "lost", "node": current.rank, "why": why, "by": current.rank}
            current.last_words.post(last)
        os._exit(0)


class _Round:
    """Those who have met, until they meet anew: facts, the log, and the pulse."""

    def __init__(self, member: Member, prefix: str, rank: int, size: int) -> None:
        self.prefix, self.rank, self.size = prefix, rank, size
        self.over = threading.Event()
        self._member = member
        self._store = member.connect()
        self.log = SharedLog(self._store, prefix)
        # A connection kept for that: making one may take longer than we have by then (a name
        # server that does not answer), and the others are in use.
        self.last_words = SharedLog(member.connect(), prefix)
        self._living = set(range(size))

    def begin(self, facts: Record) -> None:
        """Introduce ourselves, and start the threads. Raises ``Refused`` if our place is taken."""
        member, key = self._member, f"{self.prefix}/node/{self.rank}"
        mine = f"{facts['name']} {os.getpid()} {time.time()}"
        owner = self._store.compare_set(key, "", mine).decode()
        if owner != mine:
            raise Refused(
                f"node {self.rank} of job {member.config.job_id} is there already"
                f" ({owner.partition(' ')[0]}): give each node its own --node-rank, and each job"
                " in a store its own --rdzv-id"
            )
        self._store.set(self._pulse_key(self.rank), "0")
        member.tell(messages.Met(self.rank, self.size))
        for work in (self._read, self._beat, self._exchange_statuses):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()
        self._exchange(facts)

    # --- facts --------------------------------------------------------------------------------

    def _exchange(self, facts: Record) -> None:
        """Node 0 gets everybody's facts, and everybody the difference between clocks.

        Node 0's time is published when all are known to wait for it, so what lies between it and
        a node's own is the difference of clocks and one message.
        """
        if self.rank == 0:
            self._store.set(self._facts_key(0), json.dumps(facts))
            gathered = self._gather()
            self._store.set(f"{self.prefix}/clock", repr(time.time()))
            self._wait_for([self._offset_key(rank) for rank in range(1, self.size)])
            for rank in range(1, self.size):
                gathered[rank]["clock_offset_s"] = float(self._store.get(self._offset_key(rank)))
            self._member.tell(messages.Gathered(gathered))
            return
        self._store.set(self._facts_key(self.rank), json.dumps(facts))
        self._wait_for([f"{self.prefix}/clock"])
        now = time.time()
        offset = now - float(self._store.get(f"{self.prefix}/clock"))
        self._store.set(self._offset_key(self.rank), f"{offset:.6f}")

    def _gather(self) -> list[Record]:
        deadline = time.monotonic() + self._member.config.join_s
        missing = list(range(1, self.size))
        told: list[int] = []
        while missing:
            try:
                self._store.wait([self._facts_key(missing[0])], timedelta(seconds=_LOOK_S))
            except RuntimeError as error:
                if is_lost(error):
                    raise
            missing = [rank for rank in missing if not self._store.check([self._facts_key(rank)])]
            if missing and missing != told:
                told = missing
                names = [facts["name"] for facts in self._facts_but(missing)]
                self.log.post({"kind": "waiting", "missing": missing, "here": names})
            if missing and time.monotonic() > deadline:
                raise Refused(self._why_missing(missing))
        return self._facts_but(())

    def _facts_but(self, missing: Collection[int]) -> list[Record]:
        here = (rank for rank in range(self.size) if rank not in missing)
        return [json.loads(self._store.get(self._facts_key(rank))) for rank in here]

    def _why_missing(self, missing: list[int]) -> str:
        nodes = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        here = " ".join(facts["name"] for facts in self._facts_but(missing))
        return f"{nodes} did not come within {self._member.config.join_s:.0f}s; here: {here}"

    def _wait_for(self, keys: list[str]) -> None:
        limit_s = self._member.config.join_s
        try:
            if keys:
                self._store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError as error:
            if is_lost(error):
                raise
            raise Refused(f"the other nodes were not all there within {limit_s:.0f}s") from None

    # --- threads ------------------------------------------------------------------------------

    def _guarded(self, work: Any) -> None:
        try:
            work(self._member.connect())
        except RuntimeError as error:  # torch's store errors are
            if not self.over.is_set():
                self._member.tell(messages.StoreLost(_first_line(error)))

    def _read(self, store: Any) -> None:
        log, number = SharedLog(store, self.prefix), 0
        limit = timedelta(seconds=self._member.config.beat_s)
        while not self.over.is_set():
            record = log.read(number, limit)
            if record is None:
                continue
            number += 1
            if record["kind"] in ("lost", "bye"):
                self._living.discard(record.get("node", -1))
            self._member.tell(messages.Logged(record))

    def _beat(self, store: Any) -> None:
        config, count = self._member.config, 0
        watch = PulseWatch(config.beat_s * config.missed_beats)
        log = SharedLog(store, self.prefix)
        while not self.over.wait(config.beat_s / 2):  # the beat itself is the event
            count += 1
            store.set(self._pulse_key(self.rank), str(count))
            ranks = watched_by(self.rank, self._living)
            keys = [self._pulse_key(rank) for rank in ranks]
            # A node that has met but not yet beaten is not there to be judged.
            if keys and store.check(keys):
                counts = dict(zip(ranks, map(int, store.multi_get(keys)), strict=True))
                for rank in watch.look(time.monotonic(), counts):
                    why = f"nothing was heard of it for {config.beat_s * config.missed_beats:g}s"
                    log.post({"kind": "lost", "node": rank, "why": why, "by": self.rank})
                    self._living.discard(rank)
            self._member.tell(messages.Tick())

    def _exchange_statuses(self, store: Any) -> None:
        statuses = Statuses(store, self.prefix, self.rank, self._living.copy)
        statuses.exchange(Path(self._member.config.run_dir), self.over)

    def _pulse_key(self, rank: int) -> str:
        return f"{self.prefix}/pulse/{rank}"

    def _facts_key(self, rank: int) -> str:
        return f"{self.prefix}/facts/{rank}"

    def _offset_key(self, rank: int) -> str:
        return f"{self.prefix}/offset/{rank}"


class _Static:
    """Everybody knows its place: there is nothing to negotiate, and torch is not needed."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def meet(self, attempt: int) -> _Round:
        config = self._member.config
        assert config.rank is not None
        prefix = f"ncclops/{config.job_id}/attempt{attempt}"
        return _Round(self._member, prefix, config.rank, config.most)

    def close(self) -> None:
        return


class _Dynamic:
    """torch.distributed.elastic's c10d rendezvous; each attempt is a round of it."""

    def __init__(self, member: Member) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        config = member.config
        self._member = member
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"[{config.host}]:{config.port}"
            if ":" in config.host
            else f"{config.host}:{config.port}",
            run_id=config.job_id,
            min_nodes=config.active,
            max_nodes=config.most,
            # Only a name here, by which torch orders the nodes and we tell who is there.
            local_addr=config.name,
            # The agent hosts the store in a process of its own, on whichever node it belongs.
            is_host=False,
            join_timeout=round(config.join_s),
            last_call_timeout=round(config.last_call_s),
            keep_alive_interval=round(config.beat_s),
            keep_alive_max_attempt=config.missed_beats,
        )
        backend, store = create_backend(parameters)
        self._handler = create_handler(store, backend, parameters)
        self._seen: list[str] = []  # who was here when a node last came or went

    def meet(self, attempt: int) -> _Round:  # noqa: ARG002 - torch counts the rounds itself
        from torch.distributed.elastic.rendezvous.api import (
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousGracefulExitError,
            RendezvousTimeoutError,
        )

        config, met = self._member.config, threading.Event()
        ended_before = self._handler.is_closed()
        threading.Thread(target=self._tell_who_is_here, args=(met,), daemon=True).start()
        try:
            joined = self._next_round()
        except RendezvousTimeoutError:
            # By now torch has taken us off its list, and others who gave up themselves.
            here = " ".join(sorted({config.name, *self._seen}))
            raise Refused(
                f"fewer than {config.active} nodes came within {config.join_s:.0f}s; here: {here};"
                f" the others need the same --rdzv-endpoint and --rdzv-id ({config.job_id})"
            ) from None
        except RendezvousConnectionError as error:
            raise RuntimeError(_first_line(error.__cause__ or error)) from None
        except RendezvousClosedError:
            if not ended_before:
                raise _NotNeeded from None
            raise Refused(
                f"the job with --rdzv-id {config.job_id} has ended in this store: give this one"
                " another --rdzv-id"
            ) from None
        except RendezvousGracefulExitError:
            raise _NotNeeded from None
        finally:
            met.set()
        if joined.rank == 0:
            joined.store.set("ncclops", os.urandom(8).hex())
        prefix = f"ncclops/{config.job_id}/{joined.store.get('ncclops').decode()}"
        return _Round(self._member, prefix, joined.rank, joined.world_size)

    def _next_round(self) -> Any:
        """The next round, for as long as it takes where one is under way without us."""
        from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

        while True:
            try:
                return self._handler.next_rendezvous()
            except RendezvousTimeoutError:
                if not self._has_begun():
                    raise

    def close(self) -> None:
        """No node may join any more: a node that waits in reserve is sent home."""
        self._handler.shutdown()

    def _tell_who_is_here(self, met: threading.Event) -> None:
        told: tuple[list[str], bool] | None = None
        while not met.wait(_LOOK_S):
            here, begun = self._here(), self._has_begun()
            if (here, begun) != told and here:
                told, self._seen = (here, begun), here
                self._member.tell(messages.Waiting(here, begun))

    def _has_begun(self) -> bool:
        """Whether a round is under way without us: we wait for the next one."""
        complete = bool(getattr(self._state, "complete", False))
        return complete and self._member.config.name not in self._here()

    @property
    def _state(self) -> Any:
        # Not public; where a torch has it differently, we cannot say who is there.
        return getattr(getattr(self._handler, "_state_holder", None), "state", None)

    def _here(self) -> list[str]:
        try:
            return sorted(node.addr for node in list(getattr(self._state, "participants", ())))
        except (AttributeError, RuntimeError):
            return []


def _tcp_store_class(backend: str) -> Any:
    if backend == "static":
        from ncclops.restart.store_server import load_tcp_store

        return load_tcp_store()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # workers get a store from us
    from torch.distributed import TCPStore

    return TCPStore


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def main(arguments: list[str]) -> None:
    fd, config = int(arguments[0]), Config(**json.loads(arguments[1]))
    # Our end is the agent's end; a signal that was meant for all of its descendants must not
    # keep us from telling the others.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # nodes.log
    agent = socket.socket(fileno=fd)
    try:
        member = Member(config, agent)
    except Exception as error:
        log.exception("no connection to the store")
        agent.sendall(messages.encode(messages.NoRound(_first_line(error))))
        return
    member.run()


if __name__ == "__main__":
    main(sys.argv[1:])
