"""How the nodes of a round find each other: the two backends of the rendezvous process."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

from ncclops.cluster import messages
from ncclops.cluster.rendezvous_link import Link, NotNeeded, Refused, first_line
from ncclops.cluster.round_member import RoundMember
from ncclops.cluster.steady_clock import SteadyDatetime
from ncclops.host_name import with_port
from ncclops.restart.store_server import load_tcp_store

# Between two looks at which nodes are there. torch's rendezvous keeps that in one value that
# changes with each heartbeat: there is no key to wait for.
_LOOK_S = 2.0
_LEAVES_WITHIN = timedelta(seconds=3)
# torch's rendezvous looks once a second whether the job has ended; one that was killed never does.
_HEARD_WITHIN_S, _HEARD_LOOK_S = 3.0, 0.1
_RENDEZVOUS = "torch.distributed.elastic.rendezvous"


def load_part_of_torch() -> None:
    """Import torch's rendezvous in a process that has not imported torch, and little else of it.

    The rendezvous uses torch's stores alone, which its extension module has. That takes 0.7 s of a
    core and 150 MB, and all of torch 2.4 s and 225 MB (2.13, CPU build). Raises whatever the import
    does in a torch that needs more; no other import of torch may be tried in this process then.
    """
    load_tcp_store()
    package = sys.modules["torch.distributed"]
    for name, value in vars(sys.modules["torch._C._distributed_c10d"]).items():
        if not hasattr(package, name):
            setattr(package, name, value)
    for module in ("dynamic_rendezvous", "c10d_rendezvous_backend"):
        importlib.import_module(f"{_RENDEZVOUS}.{module}")


class StaticBackend:
    """Each node was given its rank: there is nothing to negotiate, and torch is not needed."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def meet(self, attempt: int) -> RoundMember:
        config = self._link.config
        assert config.rank is not None
        prefix = f"ncclops/{config.job_id}/attempt{attempt}"
        return RoundMember(self._link, prefix, config.rank, config.most)

    def close(self) -> None:
        return

    def leave(self) -> None:
        return


class TorchBackend:
    """torch.distributed.elastic's c10d rendezvous; each attempt is a round of it."""

    def __init__(self, link: Link) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

        if getattr(dynamic_rendezvous, "datetime", None) is datetime:
            dynamic_rendezvous.datetime = SteadyDatetime
        config = link.config
        self._link = link
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=with_port(config.host, config.port),
            run_id=config.job_id,
            min_nodes=config.active,
            max_nodes=config.most,
            # Only a name here: torch orders the nodes by it, and messages show it.
            local_addr=config.name,
            # The store is hosted by the agent of one node, in a separate process.
            is_host=False,
            join_timeout=round(config.join_s),
            last_call_timeout=round(config.last_call_s),
            keep_alive_interval=round(config.beat_s),
            keep_alive_max_attempt=config.missed_beats,
        )
        backend, store = create_backend(parameters)
        self._handler = dynamic_rendezvous.create_handler(store, backend, parameters)
        self._store = link.connect()  # now: once the store is gone, it would be tried for long
        self._is_waiting = False
        self._seen: list[str] = []  # who was here when a node last came or went

    def meet(self, attempt: int) -> RoundMember:  # noqa: ARG002 - torch counts the rounds itself
        from torch.distributed.elastic.rendezvous.api import (
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousGracefulExitError,
            RendezvousTimeoutError,
        )

        config, met = self._link.config, threading.Event()
        ended_before = self._handler.is_closed()
        threading.Thread(target=self._report_who_is_here, args=(met,), daemon=True).start()
        try:
            with self._waiting():
                joined = self._next_round()
        except RendezvousTimeoutError:
            # By now torch has removed us from its list, and other nodes that gave up.
            here = " ".join(sorted({config.name, *self._seen}))
            raise Refused(
                f"fewer than {config.active} nodes came within {config.join_s:.0f}s; here: {here};"
                f" the others need the same --rdzv-endpoint and --rdzv-id ({config.job_id})"
            ) from None
        except RendezvousConnectionError as error:
            raise RuntimeError(first_line(error.__cause__ or error)) from None
        except RendezvousClosedError:
            if not ended_before:
                raise self._ended_meanwhile() from None
            raise Refused(
                f"the job with --rdzv-id {config.job_id} has ended in this store: give this one"
                " another --rdzv-id"
            ) from None
        except RendezvousGracefulExitError:
            raise NotNeeded from None
        finally:
            met.set()
        if joined.world_size < max(config.active, joined.rank + 1):
            raise Refused(
                f"the nodes lost each other while they met: node {joined.rank} of"
                f" {joined.world_size} here. torch compares the times of their heartbeats: do their"
                " clocks agree?"
            )
        if joined.rank == 0:
            joined.store.set("ncclops", os.urandom(8).hex())
        prefix = f"ncclops/{config.job_id}/{joined.store.get('ncclops').decode()}"
        return RoundMember(self._link, prefix, joined.rank, joined.world_size)

    def _ended_meanwhile(self) -> Exception:
        """What it means that another node has ended the rendezvous in which this one waited."""
        if not 0 < len(self._seen) < self._link.config.active:
            return NotNeeded()
        here = " ".join(self._seen)
        return Refused(
            f"another node has ended the job before {self._link.config.active} nodes were there:"
            f" they did not come in its time, or it was stopped; here: {here}"
        )

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
        """End the rendezvous: no node may join any more, and spare nodes that wait are released.

        Returns once these have heard it: with this node the store may go, and they would take
        the end of the job for its loss.
        """
        self._handler.shutdown()
        deadline = time.monotonic() + _HEARD_WITHIN_S
        with suppress(RuntimeError):  # the store has gone already
            while self._store.add(self._waiting_key, 0) > 0 and time.monotonic() < deadline:
                threading.Event().wait(_HEARD_LOOK_S)  # torch's store tells of no change

    @property
    def _waiting_key(self) -> str:
        return f"ncclops/{self._link.config.job_id}/waiting"

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Counted in the store among the nodes that wait for a round, or for the job's end."""
        self._store.add(self._waiting_key, 1)
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False
            with suppress(RuntimeError):  # the store has gone
                self._store.add(self._waiting_key, -1)

    def leave(self) -> None:
        """Take this node off torch's list, so that the next round of the others begins at once, and
        none begins with it. In any thread, also while another one waits in ``meet``.

        Not public in torch: without it they wait until its heartbeats are missed.
        """
        with suppress(ImportError, AttributeError, TypeError, RuntimeError):
            from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

            handler: Any = self._handler
            handler._stop_heartbeats()
            deadline = handler._get_deadline(_LEAVES_WITHIN)
            handler._op_executor.run(torchs._RendezvousExitOp(), deadline)
            if self._is_waiting:
                self._store.add(self._waiting_key, -1)

    def _report_who_is_here(self, met: threading.Event) -> None:
        reported: tuple[list[str], bool] | None = None
        while not met.wait(_LOOK_S):
            here, begun = self._here(), self._has_begun()
            if (here, begun) != reported and here:
                reported, self._seen = (here, begun), here
                self._link.send(messages.Waiting(here, begun, self._link.first))

    def _has_begun(self) -> bool:
        """Whether a round is under way without us: we wait for the next one."""
        complete = bool(getattr(self._state, "complete", False))
        return complete and not self._takes_part()

    def _takes_part(self) -> bool:
        """Whether this node is in the round. Not by its name: a host may have several agents."""
        node = getattr(self._handler, "_this_node", None)  # not public either
        if node is None:
            return self._link.config.name in self._here()
        return node in list(getattr(self._state, "participants", ()))

    @property
    def _state(self) -> Any:
        # Not public; where a torch has it differently, we cannot say who is there.
        return getattr(getattr(self._handler, "_state_holder", None), "state", None)

    def _here(self) -> list[str]:
        try:
            return sorted(node.addr for node in list(getattr(self._state, "participants", ())))
        except (AttributeError, RuntimeError):
            return []
