"""The options that say where a node is in a job, in torchrun's spelling."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """As given on the command line, or as a scheduler's variables say; None where not given.

    ``ncclops.cluster.rendezvous_config`` makes values of them.
    """

    nnodes: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    local_addr: str | None = None
    nproc: str | None = None
    max_restarts: int | None = None

    def filled_in(self, found: NodeOptions) -> NodeOptions:
        """These, and from a scheduler's what they leave open.

        Where an address to meet is given, the scheduler's rendezvous is not used.
        """
        given = self
        if given.master_addr or given.rdzv_endpoint:
            found = replace(
                found, master_addr=None, master_port=None, rdzv_endpoint=None, rdzv_backend=None
            )
            if given.rdzv_backend == "c10d" or (given.rdzv_endpoint and given.node_rank is None):
                given = replace(given, rdzv_backend="c10d")
        own = asdict(found)
        return replace(
            given, **{name: own[name] for name, value in asdict(given).items() if value is None}
        )
