"""What this node brings to a job of several nodes, gathered before the run begins."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from ncclops._version import __version__
from ncclops.env.host import describe_host
from ncclops.env.secrets import redact
from ncclops.env.sources import from_files
from ncclops.errors import UsageError
from ncclops.launch import store, workers
from ncclops.launch.party import Party
from ncclops.nodes import fingerprint, interfaces
from ncclops.nodes.meeting import Meeting

if TYPE_CHECKING:
    from ncclops.launch.command import Prepared

# Values that a run fills in are compared as they are written: directories are a node's own.
_UNFILLED = {"run_dir": "{run_dir}", "rank_dir": "{rank_dir}"}


def bring(prepared: Prepared, meeting: Meeting) -> Party:
    """This node's part, with the socket of the job's store where this node hosts that.

    Raises ``UsageError`` when the store's port is taken by something else.
    """
    listener = _host(meeting) if _is_host(meeting) else None
    return Party(
        meeting=meeting,
        name=socket.gethostname(),
        print=_fingerprint(prepared, meeting),
        allowed=prepared.request.allowed_differences,
        listener=listener,
    )


def doubt(meeting: Meeting) -> str | None:
    """What looks like a ``--node-rank`` that was left out: a second node 0, with its own store."""
    if meeting.backend != "static" or meeting.rank != 0 or meeting.external:
        return None
    host = meeting.host
    if not interfaces.resolve(host) or interfaces.is_here(host):
        return None
    return (
        f"this is node 0, which serves the store, but {host} is no address of this host: was"
        " --node-rank forgotten?"
    )


def _is_host(meeting: Meeting) -> bool:
    """Whether the job's store is this node's to host."""
    if meeting.external:
        return False
    if meeting.pace.hosts_store is not None:
        return meeting.pace.hosts_store
    if meeting.backend == "static":
        return meeting.rank == 0
    return interfaces.is_here(meeting.host)


def _host(meeting: Meeting) -> socket.socket | None:
    """The store's socket; None where a store is served already (``ncclops store serve``)."""
    try:
        return store.listen(host=meeting.host, port=meeting.port)
    except UsageError:
        if meeting.backend == "c10d" and _is_served(meeting.port):
            return None
        raise


def _is_served(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def _fingerprint(prepared: Prepared, meeting: Meeting) -> fingerprint.Fingerprint:
    request, stack = prepared.request, prepared.stack
    environ = prepared.plan.apply(os.environ, _UNFILLED)
    full = environ | {name: found.value for name, found in from_files(environ).items()}
    for name in workers.identity_names():
        full.pop(name, None)
    planned = [change.name for change in prepared.plan.changes]
    host = describe_host(environ)
    address = meeting.local_addr or interfaces.address_towards(meeting.host)
    facts = {
        "ncclops": __version__,
        "profile": request.profile.name,
        "restart": request.mode,
        "workers per node": str(prepared.layout.nproc),
        "torch": stack.torch,
        "NCCL": stack.nccl,
        "driver branch": stack.driver and stack.driver.partition(".")[0],
        "driver": stack.driver,
        "CUDA": stack.cuda,
        "Python": stack.python,
        "GPU": stack.gpu,
        "commit": stack.commit,
        "script": " ".join((request.target.name, *request.target.arguments)),
        "interface": interfaces.interface_of(address),
        "HCAs": ",".join(sorted(host.hcas)) or None,
    }
    return fingerprint.Fingerprint(
        host=socket.gethostname(),
        variables=redact(fingerprint.relevant(full, planned)),
        facts=facts,
        per_host=request.profile.per_host,
    )
