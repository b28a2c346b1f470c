"""How many collectives this process has enqueued and completed, as torch's flight recorder has it.

Only where the recorder runs (profiles switch it on) and torch is loaded. For each group it knows
the number of the last collective enqueued and completed; reading that takes a tenth of a
millisecond, and neither stacks nor entries. The numbers of groups that are gone stay, so those of
an earlier start of the script are left out.

Other recorders than NCCL's take completions in the order in which threads come to report them, so
that the last one reported need not be the last one. There, "all are completed" can be believed, and
"one is not" cannot.

A call that waits for its peers before torch counts it, as NCCL's do until the ranks are connected,
counts as enqueued where no other one is pending.

Messages between two ranks of NCCL are counted with them. torch's second engine takes those of a
batch for done at once: where one comes last, what was completed is not known. While nothing moves,
the entries are read as well: the oldest one that is pending tells which rank a message waits for.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ncclops import flight_recorders
from ncclops.receipts.silent import Silent

# Periodic, because no event says that collectives no longer come.
_EVERY_S = 1.0
# "nccl:send 0->1" and "nccl2:recv 1<-0": this rank and the other one, by their places in the group.
_PEER = re.compile(r"\d+(?:->|<-)(\d+)$")
# What ends a batch of them.
_BATCH = "nccl:coalesced"

Counted = tuple[int, int | None]
Statuses = Mapping[str, Mapping[str, Any]]


class CollectiveCounter:
    """Notes the counters on the progress page of ``recorder``, in a separate thread.

    Not in the recorder's: its heartbeat must not depend on torch. ``is_in_call``: whether the main
    thread is in a call that waits for peers; ``wait``: the number of the wait in the kernel that it
    is in, 0 for none. Any thread calls them.
    """

    def __init__(
        self, recorder: Silent, is_in_call: Callable[[], bool], wait: Callable[[], int]
    ) -> None:
        self._recorder = recorder
        self._is_in_call, self._wait = is_in_call, wait
        self._earlier: frozenset[str] = frozenset()
        self._on_nccl: Callable[[], object] | None = None

    def on_nccl_in_use(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` once, from this thread, when NCCL has completed a collective.

        To be set before ``start``. ``OSError`` that it raises is ignored.
        """
        self._on_nccl = listener

    def start(self) -> None:
        if not self._recorder.active:
            return
        self._recorder.on_iteration(self.begin_iteration)
        threading.Thread(target=self._run, name="ncclops-counters", daemon=True).start()

    def begin_iteration(self) -> None:
        """The script starts (again): earlier groups no longer count."""
        self._earlier = frozenset(read_statuses())
        self._recorder.note_collectives(None)

    def groups_completed(self) -> tuple[int, int]:
        """How many groups have completed a collective in this start: of NCCL, and others."""
        done = _completed(read_statuses()) - self._earlier
        of_nccl = sum(map(_is_of_nccl, done))
        return of_nccl, len(done) - of_nccl

    def _run(self) -> None:
        pause = threading.Event()
        before: Counted | None = None
        may_wait: bool | None = None
        while not pause.wait(_EVERY_S):
            earlier = self._earlier
            statuses = read_statuses()
            if self._on_nccl is not None and any(map(_is_of_nccl, _completed(statuses))):
                listener, self._on_nccl = self._on_nccl, None
                with suppress(OSError):
                    listener()
            is_in_call = self._is_in_call()
            counted = count(statuses, earlier, is_in_call=is_in_call)
            peer = awaited(earlier) if counted == before else None
            if counted != before:
                may_wait = None
            elif may_wait is None:
                may_wait = may_wait_for_batch(earlier)
            before = counted
            if counted is not None and counted[0] == counted[1] and may_wait:
                counted = counted[0], None
            if earlier is self._earlier:  # else the script has started again meanwhile
                wait = self._wait() if is_in_call else 0
                self._recorder.note_collectives(counted, peer, wait)


def _is_of_nccl(group: str) -> bool:
    return group.partition("/")[0] in flight_recorders.ALL_OF_NCCL


def _completed(statuses: Statuses) -> set[str]:
    """The groups that have completed a collective."""
    return {
        name
        for name, status in statuses.items()
        if (_number(status, "last_completed_collective") or 0) > 0
    }


def count(
    statuses: Statuses, earlier: frozenset[str] = frozenset(), *, is_in_call: bool = False
) -> Counted | None:
    """Collectives enqueued and completed in all groups but ``earlier``; None: not counted.

    What was completed is None where that is unknown. ``is_in_call``: the main thread is in a call
    that waits for peers.
    """
    enqueued = completed = 0
    known, in_doubt = False, False
    for name, status in statuses.items():
        last = _number(status, "last_enqueued_collective")
        if name in earlier or last is None:
            continue
        done = _number(status, "last_completed_collective") or 0
        if done > last:
            # NCCL's sends and receives have numbers of their own, and the last one is one of them.
            done = last - 1
        in_doubt = in_doubt or (done < last and not _is_of_nccl(name))
        known = True
        enqueued += last
        completed += done
    if is_in_call and enqueued == completed:
        enqueued += 1
    return (enqueued, None if in_doubt else completed) if known else None


def awaited(earlier: frozenset[str] = frozenset()) -> int | None:
    """The rank, by its number in the default group, that this one's oldest pending operation of
    NCCL waits for. Groups ``earlier`` do not count.

    None: it is no message, or a batch of them with several ranks, or nothing is known.
    """
    for name in flight_recorders.ALL_OF_NCCL:
        found = _awaited(name, earlier)
        if found is not None:
            return found
    return None


def _awaited(recorder: str, earlier: frozenset[str]) -> int | None:
    try:
        document = _read(recorder, with_operations=True)
        pending = [
            e for e in document.get("entries", ()) if f"{recorder}/{e['pg_id']}" not in earlier
        ]
        pending.sort(key=lambda entry: int(entry["record_id"]))
        found = []
        for entry in pending:
            if (peer := _PEER.search(entry["profiling_name"])) is None:
                break
            members = json.loads(document["pg_config"][entry["process_group"][0]]["ranks"])
            found.append(int(members[int(peer[1])]))
        are_batch = len(found) < len(pending) and pending[len(found)]["profiling_name"] == _BATCH
        return found[0] if not are_batch or len(set(found)) == 1 else None
    except (TypeError, ValueError, LookupError):  # another release's, or none
        return None


def may_wait_for_batch(earlier: frozenset[str] = frozenset()) -> bool:
    """Whether the last operation of a group is a message of which no recorder knows whether it has
    ended: torch's second engine takes those of a batch for done as they begin.

    Reads all operations, 10 to 20 us each. Groups ``earlier`` do not count.
    """
    recorder = flight_recorders.SECOND_OF_NCCL
    newest: dict[str, tuple[int, bool]] = {}
    try:
        for entry in _read(recorder, with_operations=True, pending=False).get("entries", ()):
            group = f"{recorder}/{entry['pg_id']}"
            found = int(entry["record_id"]), bool(entry["is_p2p"])
            newest[group] = max(newest.get(group, found), found)
    except (TypeError, ValueError, LookupError):
        return False
    return any(is_message for group, (_, is_message) in newest.items() if group not in earlier)


def read_statuses() -> Statuses:
    """By group, what the flight recorders know; empty where there is none."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in flight_recorders.ALL:
        statuses = _read(name).get("pg_status") or {}
        if name == flight_recorders.SECOND_OF_NCCL:
            statuses = {group: _from_one(status) for group, status in statuses.items()}
        found |= {f"{name}/{group}": status for group, status in statuses.items()}
    return found


def _from_one(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """``status`` of the second engine, whose first operation is number 0, as others have it."""
    numbers = {name: _number(status, name) for name in status}
    return {name: None if number is None else number + 1 for name, number in numbers.items()}


def _read(recorder: str, *, with_operations: bool = False, pending: bool = True) -> dict[str, Any]:
    """What it has of groups, and of operations: those that are ``pending``, or all."""
    dump = flight_recorders.dumps(as_json=True).get(recorder)
    if dump is None:
        return {}
    try:
        document: dict[str, Any] = json.loads(dump(with_operations, pending))
    except (RuntimeError, TypeError, ValueError):  # another release's arguments, or words
        return {}
    return document


def _number(status: Mapping[str, Any], name: str) -> int | None:
    try:
        value = int(status[name])
    except (KeyError, TypeError, ValueError):
        return None
    return value if value >= 0 else None
