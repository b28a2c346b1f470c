"""What this node brings to a job of several nodes, gathered before the run begins."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ncclops._version import __version__
from ncclops.agent import hosted_store, workers
from ncclops.cluster import fingerprint
from ncclops.cluster.node_info import NodeInfo
from ncclops.cluster.rendezvous_config import RendezvousConfig
from ncclops.control import holders
from ncclops.env.host import describe_host
from ncclops.env.origins import from_files
from ncclops.errors import UsageError
from ncclops.host import interfaces
from ncclops.host_name import host_name
from ncclops.launch.prepared import Prepared
from ncclops.profiles.model import Parameter, as_text
from ncclops.redaction.redactor import Redactor, redact_variables

if TYPE_CHECKING:
    from ncclops.preflight.part import NodeCheck

# Values that a run fills in are compared as they are written: directories are a node's own.
_UNFILLED = {"run_dir": "{run_dir}", "rank_dir": "{rank_dir}"}


def bring(
    prepared: Prepared, rendezvous: RendezvousConfig, check: NodeCheck | None = None
) -> NodeInfo:
    """This node's part, with the socket of the job's store where this node hosts that.

    ``check`` is how it is checked before a start.

    Raises ``UsageError`` when the store's port is taken by something else.
    """
    listener = None
    if _is_host(rendezvous):
        listener = _host(rendezvous)
        other = None if listener is not None else holders.run_at(rendezvous.port)
        if other is not None and (nodes := other.record.nodes) and nodes.id != rendezvous.job_id:
            prepared.remarks.append(
                f"the store at {rendezvous.address} is that of job {nodes.id}, {other}: it ends"
                " with that; name another port, or a store of its own (`ncclops store serve`)"
            )
    return NodeInfo(
        rendezvous=rendezvous,
        name=host_name(),
        print=_fingerprint(prepared, rendezvous),
        allowed=prepared.request.allowed_differences,
        script=Path(prepared.request.target.name).name,
        listener=listener,
        check=check,
    )


def doubt(rendezvous: RendezvousConfig) -> str | None:
    """A remark if ``--node-rank`` seems to be missing: a second node 0, with its own store."""
    if rendezvous.backend != "static" or rendezvous.rank != 0 or rendezvous.external:
        return None
    host = rendezvous.host
    if not interfaces.resolve(host) or interfaces.is_here(host):
        return None
    return (
        f"this is node 0, which serves the store, but {host} is no address of this host: was"
        " --node-rank forgotten?"
    )


def _is_host(rendezvous: RendezvousConfig) -> bool:
    """Whether the job's store is this node's to host."""
    if rendezvous.external:
        return False
    if rendezvous.pace.hosts_store is not None:
        return rendezvous.pace.hosts_store
    if rendezvous.backend == "static":
        return rendezvous.rank == 0
    return interfaces.is_here(rendezvous.host)


def _host(rendezvous: RendezvousConfig) -> socket.socket | None:
    """The store's socket; None where a store is served already (``ncclops store serve``)."""
    try:
        return hosted_store.listen(host=rendezvous.host, port=rendezvous.port)
    except UsageError:
        if rendezvous.backend == "c10d" and _is_served(rendezvous.port):
            return None
        raise


def _is_served(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def _fingerprint(prepared: Prepared, rendezvous: RendezvousConfig) -> fingerprint.Fingerprint:
    request, stack = prepared.request, prepared.stack
    environ = prepared.plan.apply(os.environ, _UNFILLED)
    full = environ | {name: found.value for name, found in from_files(environ).items()}
    for name in workers.identity_names():
        full.pop(name, None)
    planned = [change.name for change in prepared.plan.changes]
    host = describe_host(environ)
    address = rendezvous.local_addr or interfaces.address_towards(rendezvous.host)
    facts = {
        "ncclops": __version__,
        "profile": request.profile.name,
        "parameters": _in_words(request.profile.parameters),
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
        "preflight": request.preflight,
        "script": Redactor().text(" ".join((request.target.name, *request.target.arguments))),
        "interface": interfaces.interface_of(address),
        "HCAs": ",".join(sorted(host.hcas)) or None,
    }
    return fingerprint.Fingerprint(
        host=host_name(),
        variables=redact_variables(fingerprint.relevant(full, planned)),
        facts=facts,
        per_host=request.profile.per_host,
    )


def _in_words(parameters: Mapping[str, Parameter]) -> str | None:
    return ", ".join(f"{name}={as_text(parameters[name])}" for name in sorted(parameters)) or None
