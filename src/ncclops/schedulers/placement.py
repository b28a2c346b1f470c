"""This node's place, by the variables of what started it: Slurm, Open MPI, Kubernetes.

Read from the variables that each of them gives its processes, and used only where the command
line leaves something open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ncclops.errors import UsageError
from ncclops.schedulers import hostlist
from ncclops.schedulers.node_options import NodeOptions
from ncclops.whole_numbers import whole_number

Environ = Mapping[str, str]

# The port of a job that names none: derived from the job's number, because the processes cannot
# agree on one before they meet, and different for jobs that share a host. Below the range that the
# kernel assigns.
_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True, kw_only=True)
class SchedulerPlacement:
    """What a scheduler says of this process.

    ``hosts`` are the nodes by name, in the order of their ranks.
    """

    source: str
    options: NodeOptions = field(default_factory=NodeOptions)
    hosts: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def find_placement(environ: Environ) -> SchedulerPlacement | None:
    """What the scheduler says, the most explicit one first; None outside of all of them.

    Raises ``UsageError`` where it started more than one process on a node, and where a variable
    does not have the form that the scheduler gives it.
    """
    for reader in _READERS:
        if (placement := reader(environ)) is not None:
            return placement
    return None


def _torchrun_variables(environ: Environ) -> SchedulerPlacement | None:
    """``PET_*``, torchrun's own variables for its options, as PyTorchJob and MPIJob set them."""
    pet = {k.removeprefix("PET_"): v for k, v in environ.items() if k.startswith("PET_") and v}
    if not pet.keys() & {"NNODES", "NODE_RANK", "RDZV_ENDPOINT", "MASTER_ADDR"}:
        return None
    return SchedulerPlacement(
        source="PET_* variables",
        options=NodeOptions(
            nnodes=pet.get("NNODES"),
            node_rank=_number("PET_NODE_RANK", pet.get("NODE_RANK")),
            master_addr=pet.get("MASTER_ADDR"),
            master_port=_number("PET_MASTER_PORT", pet.get("MASTER_PORT")),
            rdzv_backend=pet.get("RDZV_BACKEND"),
            rdzv_endpoint=pet.get("RDZV_ENDPOINT"),
            rdzv_id=pet.get("RDZV_ID"),
            nproc=pet.get("NPROC_PER_NODE"),
            max_restarts=_number("PET_MAX_RESTARTS", pet.get("MAX_RESTARTS")),
        ),
    )


def _slurm(environ: Environ) -> SchedulerPlacement | None:
    """A step of Slurm: ``srun ncclops launch …``, one task on each node."""
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    named = next((n for n in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if environ.get(n)), None)
    if job is None or named is None:
        return None
    count, number = environ[named], _number(named, environ[named])
    if "SLURM_STEP_NODELIST" not in environ or step is None:
        return _slurm_batch_script(job, number or 0)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", count)
    if _number("SLURM_STEP_NUM_TASKS", tasks) != number:
        raise UsageError(
            f"srun started {tasks} tasks on {count} nodes, and `ncclops launch` starts the workers"
            " of a node itself: give srun --ntasks-per-node=1"
        )
    hosts = _hosts("SLURM_STEP_NODELIST", environ["SLURM_STEP_NODELIST"])
    return SchedulerPlacement(
        source=f"Slurm step {job}.{step}",
        options=NodeOptions(
            nnodes=count,
            node_rank=_number("SLURM_NODEID", environ.get("SLURM_NODEID")),
            master_addr=hosts[0] if hosts else None,
            master_port=_port_of(job, step),
            rdzv_id=f"slurm-{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}",
            nproc=_slurm_gpus(environ),
        ),
        hosts=hosts,
    )


def _slurm_batch_script(job: str, count: int) -> SchedulerPlacement | None:
    if count < 2:
        return None
    return SchedulerPlacement(
        source=f"Slurm job {job}",
        remarks=(
            f"this is one node of the {count} of Slurm's job {job}, and not a step on all of them:"
            " for all, start it as `srun --ntasks-per-node=1 ncclops launch …`",
        ),
    )


def _slurm_gpus(environ: Environ) -> str | None:
    """How many GPUs the step has here. ``SLURM_GPUS_ON_NODE`` is a count, the others lists."""
    if count := environ.get("SLURM_GPUS_ON_NODE"):
        return count
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if listed := environ.get(name):
            return str(len(_hosts(name, f"[{listed}]")))
    return None


def _open_mpi(environ: Environ) -> SchedulerPlacement | None:
    """``mpirun -npernode 1 ncclops launch …``."""
    size, local_size = (
        environ.get("OMPI_COMM_WORLD_SIZE"),
        environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"),
    )
    if size is None:
        return None
    if local_size not in (None, "1"):
        raise UsageError(
            f"mpirun started {local_size} processes on this node, and `ncclops launch` starts the"
            " workers of a node itself: give mpirun -npernode 1"
        )
    return SchedulerPlacement(
        source="Open MPI",
        options=NodeOptions(
            nnodes=size,
            node_rank=_number("OMPI_COMM_WORLD_RANK", environ.get("OMPI_COMM_WORLD_RANK")),
            master_addr=environ.get("MASTER_ADDR") or _open_mpi_head(environ),
            master_port=_number("MASTER_PORT", environ.get("MASTER_PORT")),
        ),
    )


def _open_mpi_head(environ: Environ) -> str | None:
    """The host of mpirun itself, from the address that its daemons call back to.

    ``OMPI_MCA_orte_hnp_uri`` (Open MPI 4) and ``PMIX_SERVER_URI*`` hold ``…;tcp://a,b:port``.
    mpirun runs, as a rule, on the first node of the job.
    """
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.search(r"tcp://([0-9a-fA-F.:]+?)[,:]", uri)
    return match[1] if match else None


def _pytorch_job(environ: Environ) -> SchedulerPlacement | None:
    """A pod of a PyTorchJob: one process per pod, so its world is the pods.

    The names are common property, so they count in a pod only, and all together. An address that
    is set and empty is asked for where there are several nodes.
    """
    wanted = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if "KUBERNETES_SERVICE_HOST" not in environ or not all(name in environ for name in wanted):
        return None
    if not environ["WORLD_SIZE"]:
        return None
    if "LOCAL_RANK" in environ:  # a worker of another launcher in the pod
        return None
    return SchedulerPlacement(
        source="PyTorchJob",
        options=NodeOptions(
            nnodes=environ["WORLD_SIZE"],
            node_rank=_number("RANK", environ["RANK"]),
            master_addr=environ["MASTER_ADDR"] or None,
            master_port=_number("MASTER_PORT", environ["MASTER_PORT"]),
        ),
    )


_READERS: tuple[Callable[[Environ], SchedulerPlacement | None], ...] = (
    _torchrun_variables,
    _slurm,
    _open_mpi,
    _pytorch_job,
)


def _port_of(job: str, step: str) -> int:
    numbers = [whole_number(text) or 0 for text in (job, step)]
    return _FIRST_PORT + (numbers[0] * 37 + numbers[1]) % _PORTS


def _hosts(name: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(hostlist.expand(text))
    except ValueError as error:
        raise UsageError(f"{name}: {error}: correct or unset it") from None


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if (number := whole_number(text)) is None:
        raise UsageError(f"{name}={text} is not a number: correct or unset it")
    return number
