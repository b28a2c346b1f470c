"""What ranks run in tests of NCCL: torch's real ``ProcessGroupNCCL``, a fake GPU for each rank."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncclops.restart._groups.aborting import abort_groups
from ncclops.testing import note
from tests.fakegpu.gpus import take_gpu

BIG = 200_001  # elements; more than fits into one round of a collective, and no multiple of it
MINUTE = timedelta(minutes=1)


def begin(backend: str = "nccl", *, eager: bool = False, timeout: timedelta = MINUTE) -> int:
    """Become a rank of the world. ``eager``: its communicator is made at once."""
    rank = int(os.environ["RANK"])
    device = take_gpu(rank)
    dist.init_process_group(backend, timeout=timeout, device_id=device if eager else None)
    return rank


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank contributes: small whole numbers, so that sums and products are exact."""
    values = (torch.arange(torch.Size(shape).numel()) * 7 + rank * 3) % 5 + rank
    return values.reshape(shape).to(dtype)


def message(action: Callable[[], Any]) -> str:
    """The error of ``action``."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "no error"


def abort_all() -> None:
    """As torch has it."""
    dist.distributed_c10d._abort_process_group()


def recorded() -> list[dict[str, Any]]:
    """The flight recorder's entries, of the engine that is used."""
    module = torch._C._distributed_c10d
    backend = dist.group.WORLD._get_backend(torch.device("cuda")).name()
    dump = module._dump_nccl_trace if backend == "nccl" else module._dump_fr_trace
    given = {} if backend == "nccl" else {"backend": backend}
    entries = pickle.loads(dump(includeStackTraces=False, **given))["entries"]
    return [dict(entry) for entry in entries]


# --- what collectives compute ---------------------------------------------------------------------

TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

# Of torch 2.13, which hands NCCL the factor for bfloat16 as a float32: NCCL reads two bytes, 0.
TYPES_OF = {"average": TYPES[:4], "sum of multiples": TYPES[:3]}

OPERATIONS: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, lambda x: x.sum(0)),
    "product": (dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
    "minimum": (dist.ReduceOp.MIN, lambda x: x.amin(0)),
    "maximum": (dist.ReduceOp.MAX, lambda x: x.amax(0)),
    "average": (dist.ReduceOp.AVG, lambda x: x.mean(0)),
    "sum of multiples": (dist._make_nccl_premul_sum(0.5), lambda x: (x * 0.5).sum(0)),
}


def types_and_operations() -> list[str]:
    """What differs from the same computation on the CPU."""
    rank = begin()
    size = dist.get_world_size()
    wrong = []
    for name, (operation, expected) in OPERATIONS.items():
        for dtype in TYPES_OF.get(name, TYPES):
            all_of_them = torch.stack([own(each, 9, dtype=dtype) for each in range(size)])
            found = own(rank, 9, dtype=dtype).cuda()
            dist.all_reduce(found, operation)
            wanted = expected(all_of_them.double()).to(dtype)
            if not torch.equal(found.cpu().double(), wanted.double()):
                wrong.append(f"{name} of {dtype}: {found.cpu()}, not {wanted}")
    dist.destroy_process_group()
    return wrong


def _gathered(size: int, *shape: int) -> torch.Tensor:
    return torch.cat([own(each, *shape) for each in range(size)])


def collectives() -> list[str]:
    """What differs from what it should be, in each collective, over several rounds."""
    rank = begin()
    size = dist.get_world_size()
    sums = torch.stack([own(each, BIG) for each in range(size)]).sum(0)
    sums_of_parts = torch.stack([own(each, size * BIG) for each in range(size)]).sum(0)
    parts = [own(each, size * BIG).chunk(size)[rank] for each in range(size)]
    wrong = []

    def check(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(found.cpu(), wanted):
            wrong.append(name)

    tensor = own(rank, BIG).cuda()
    dist.all_reduce(tensor)
    check("all_reduce", tensor, sums)
    tensor = own(rank, BIG).cuda()
    dist.broadcast(tensor, 1)
    check("broadcast", tensor, own(1, BIG))
    tensor = own(rank, BIG).cuda()
    dist.reduce(tensor, 1)
    check("reduce", tensor, sums if rank == 1 else own(rank, BIG))
    tensor = torch.empty(size * BIG, device="cuda")
    dist.all_gather_into_tensor(tensor, own(rank, BIG).cuda())
    check("all_gather", tensor, _gathered(size, BIG))
    tensor = torch.empty(BIG, device="cuda")
    dist.reduce_scatter_tensor(tensor, own(rank, size * BIG).cuda())
    check("reduce_scatter", tensor, sums_of_parts.chunk(size)[rank])
    tensor = torch.empty(size * BIG, device="cuda")
    dist.all_to_all_single(tensor, own(rank, size * BIG).cuda())
    check("all_to_all", tensor, torch.cat(parts))
    gathered = [torch.empty(BIG, device="cuda") for _ in range(size)] if rank == 0 else None
    dist.gather(own(rank, BIG).cuda(), gathered)
    if gathered is not None:
        check("gather", torch.cat([each.cpu() for each in gathered]), _gathered(size, BIG))
    tensor = torch.empty(BIG, device="cuda")
    scattered = [own(each, BIG).cuda() for each in range(size)] if rank == 1 else None
    dist.scatter(tensor, scattered, src=1)
    check("scatter", tensor, own(rank, BIG))
    uneven = [torch.empty(each + 1, device="cuda") for each in range(size)]
    dist.all_to_all(uneven, [own(rank, rank + 1).cuda() for _ in range(size)])
    check("uneven all_to_all", torch.cat([each.cpu() for each in uneven]), _gathered_uneven(size))
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def _gathered_uneven(size: int) -> torch.Tensor:
    return torch.cat([own(each, each + 1) for each in range(size)])


def coalesced() -> tuple[list[float], list[float]]:
    """Operations that go as one group."""
    rank = begin()
    size = dist.get_world_size()
    tensors = [torch.full((3,), float(rank + i), device="cuda") for i in range(3)]
    with dist._coalescing_manager(device=tensors[0].device):
        for tensor in tensors:
            dist.all_reduce(tensor)
    sums = [float(tensor.cpu()[0]) for tensor in tensors]
    # each rank sends to the next one and receives from the one before
    sent, received = own(rank, BIG).cuda(), torch.empty(BIG, device="cuda")
    requests = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    before = (rank - 1) % size
    difference = float((received.cpu() - own(before, BIG)).abs().max())
    dist.destroy_process_group()
    return sums, [difference]


def messages() -> list[float]:
    """One after the other, there and back."""
    rank = begin()
    tensor = torch.zeros(BIG, device="cuda")
    for turn in range(3):
        if rank == turn % 2:
            dist.send(tensor + 1, 1 - rank)
        else:
            dist.recv(tensor, 1 - rank)
    found = [float(tensor.cpu()[0]), float(tensor.cpu()[-1])]
    dist.destroy_process_group()
    return found


# --- groups ---------------------------------------------------------------------------------------


def sum_over(group: dist.ProcessGroup | None) -> float:
    """Of the ranks' numbers in the world."""
    tensor = torch.full((1,), float(dist.get_rank()), device="cuda")
    dist.all_reduce(tensor, group=group)
    return float(tensor.cpu())


def groups(eager: bool) -> list[float]:
    """The world, two halves that do not know of each other, and pairs that overlap."""
    rank = begin(eager=eager)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = [sum_over(None), sum_over(halves[rank // 2]), sum_over(pairs[rank % 2])]
    sum_over(None)  # the other pair may still meet in the store, which ends with rank 0
    dist.destroy_process_group()
    return found


class _Allocated(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")
    ] + [(name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")]


def ended_communicators(count: int) -> int:
    """How many more bytes are allocated after ``count`` communicators, each destroyed at once."""
    take_gpu(0)
    nccl, libc = ctypes.CDLL("libnccl.so.2"), ctypes.CDLL(None)
    libc.mallinfo2.restype = _Allocated

    class Identifier(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_byte * 128)]

    def make_and_end(times: int) -> int:
        for _ in range(times):
            identifier, comm = Identifier(), ctypes.c_void_p()
            assert nccl.ncclGetUniqueId(ctypes.byref(identifier)) == 0
            assert nccl.ncclCommInitRank(ctypes.byref(comm), 1, identifier, 0) == 0
            assert nccl.ncclCommDestroy(comm) == 0
        return int(libc.mallinfo2().uordblks)

    before = make_and_end(100)
    return make_and_end(count) - before


def split() -> float:
    """Odd and even ranks, from the world's communicator."""
    begin(eager=True)
    part = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    found = sum_over(part)
    dist.destroy_process_group()
    return found


def mixed() -> tuple[float, float, str]:
    """Tensors of the CPU by gloo, those of GPUs by NCCL."""
    begin("cpu:gloo,cuda:nccl")
    tensor = torch.full((1,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    of_gpus = sum_over(None)
    found = float(tensor), of_gpus, dist.get_backend_config()
    dist.destroy_process_group()
    return found


def shrink(excluded: int) -> float | None:
    """The world without a rank that is not there any more when it is made."""
    rank = begin(eager=True)
    sum_over(None)
    if rank == excluded:
        os._exit(0)
    small = dist.shrink_group([excluded], shrink_flags=1)
    return sum_over(small)


def one_process() -> list[float]:
    """All GPUs in one process, each with a communicator of its own."""
    tensors = [torch.full((3,), float(i + 1), device=f"cuda:{i}") for i in range(3)]
    torch.cuda.nccl.all_reduce(tensors)
    return [float(tensor.cpu()[0]) for tensor in tensors]


# --- waiting --------------------------------------------------------------------------------------


def wait_for(signal: Path) -> None:
    """Until the test has made the file."""
    while not signal.exists():
        time.sleep(0.01)


def late(go: Path) -> tuple[bool, float]:
    """Whether a collective was over before the last rank began it, and its result."""
    rank = begin()
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor)
    is_over = False
    if rank == 0:
        wait_for(go)
        dist.all_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        for _ in range(20):
            time.sleep(0.01)
            is_over = is_over or work.is_completed()
        note("looked")
        work.wait()
    found = is_over, float(tensor.cpu())
    dist.destroy_process_group()
    return found


def hang_until_aborted(kind: str, go: Path) -> str:
    """A collective in which rank 1 does not take part, or does so as another; ended by an abort."""
    rank = begin()
    group, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    sum_over(group)
    sum_over(second)
    dist.broadcast(torch.zeros(1, device="cuda"), 0, group)  # connected for it too
    tensor = torch.zeros(8 if kind == "size" and rank == 1 else 4, device="cuda")
    work = None
    if kind == "order" and rank == 1:
        work = dist.broadcast(tensor, 0, group, async_op=True)
    elif kind in ("size", "order") or rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    if kind == "behind" and rank == 0:  # on the stream that the first one holds up
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=second)
    note("begun")
    wait_for(go)
    before = "no work" if work is None else "completed" if work.is_completed() else "waits"
    # torch's own aborts one after the other, and begins with the one that waits for the other
    abort_groups() if kind == "behind" else abort_all()
    torch.cuda.synchronize()
    return before


def abort_of_init(go: Path) -> str:
    """Rank 1 never comes; rank 0 waits in its first collective until another thread aborts it."""
    rank = begin()
    if rank == 1:
        wait_for(go)
        return ""
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(message(lambda: sum_over(None))))
    thread.start()
    wait_for(go)
    abort_all()
    thread.join()
    return errors[0]


def hang_before_connected(kind: str, go: Path) -> str:
    """Rank 0 begins what rank 1 does not, for the first time; ended by an abort."""
    rank = begin()
    sum_over(None)
    if rank == 1:
        wait_for(go)
        return ""
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(torch.zeros(1, device="cuda"), 0, async_op=True),
        "messages": lambda: dist.batch_isend_irecv(
            [dist.P2POp(op, torch.zeros(1, device="cuda"), 1) for op in (dist.isend, dist.irecv)]
        ),
    }
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(message(calls[kind])))
    thread.start()
    note("begun")
    wait_for(go)
    assert not said, "it waits in the call"
    abort_groups()  # torch's own, of its second engine, waits for the end of the call
    thread.join()
    return said[0]


def revoke() -> str:
    """A hang that is revoked, not aborted; and the error of what comes after it."""
    rank = begin(eager=True)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    nccl = ctypes.CDLL("libnccl.so.2")  # torch 2.13 does not call it yet
    sum_over(None)
    if rank == 0:
        dist.all_reduce(torch.zeros(4, device="cuda"), async_op=True)
    assert nccl.ncclCommRevoke(ctypes.c_void_p(backend._comm_ptr()), 0) == 0
    torch.cuda.synchronize()
    return message(lambda: sum_over(None))


def grow() -> tuple[int, int, float]:
    """A communicator of ranks 0 and 1 takes in rank 2: the rank, the number of ranks, and a sum."""
    rank = begin(eager=True)
    nccl, store = ctypes.CDLL("libnccl.so.2"), dist.distributed_c10d._get_default_store()
    group = dist.new_group([0, 1], device_id=torch.device("cuda", torch.cuda.current_device()))
    parent, identifier = ctypes.c_void_p(), ctypes.create_string_buffer(128)
    if rank < 2:
        parent.value = group._get_backend(torch.device("cuda"))._comm_ptr()
    if rank == 0:
        assert nccl.ncclCommGetUniqueId(parent, identifier) == 0
        store.set("grows", identifier.raw)
    identifier.raw = store.get("grows")  # ranks of the parent grow once one has asked for it
    known, number = (None, -1) if rank < 2 else (identifier, rank)
    grown, size, own = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    assert nccl.ncclCommGrow(parent, 3, known, number, ctypes.byref(grown), None) == 0
    assert nccl.ncclCommCount(grown, ctypes.byref(size)) == 0
    assert nccl.ncclCommUserRank(grown, ctypes.byref(own)) == 0
    value = torch.full((1,), float(rank + 1), device="cuda")
    torch.cuda.synchronize()
    address, stream = ctypes.c_void_p(value.data_ptr()), ctypes.c_void_p(0)
    assert nccl.ncclAllReduce(address, address, ctypes.c_size_t(1), 7, 0, grown, stream) == 0
    torch.cuda.synchronize()
    return own.value, size.value, value.item()


def groups_in_other_order() -> None:
    """Two groups of the same ranks, used first in different order."""
    rank = begin()
    made = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    note("groups made")
    for group in made if rank == 0 else reversed(made):
        sum_over(group)


# --- failures -------------------------------------------------------------------------------------


def first_collective() -> str:
    """The error of a communicator that cannot be made."""
    return message(lambda: (begin(), sum_over(None)))


def on_one_gpu() -> str:
    """All ranks on GPU 0, as when a program forgets to choose."""
    os.environ["LOCAL_RANK"] = "0"  # by which torch's second engine chooses
    torch.cuda.set_device(0)
    found = message(lambda: dist.init_process_group("nccl", timeout=MINUTE))
    if dist.is_initialized():  # that engine makes the communicator there
        found = message(lambda: sum_over(None))
        dist.barrier(group=dist.new_group(backend="gloo"))
    return found


def pair(over: Path) -> str:
    """The error of a group of ranks 1 and 2, whose bootstrap has its root in rank 1."""
    rank = begin()
    group = dist.new_group([1, 2])
    if rank == 0:  # it has the store
        wait_for(over)
        return ""
    found = message(lambda: sum_over(group))
    over.touch()
    return found


def steps(count: int) -> list[str]:
    """The errors of collectives that are waited for one by one."""
    begin()
    found = [message(lambda: sum_over(None)) for _ in range(count)]
    note("done")
    return found


def wait_for_a_peer(never: Path, timeout: timedelta = MINUTE) -> None:
    """Rank 0 waits in a collective for rank 1, which is killed; its watchdog ends it."""
    rank = begin(timeout=timeout)
    sum_over(None)
    note("together")
    if rank == 1:
        wait_for(never)
    sum_over(None)


def records_of_a_hang(go: Path) -> list[tuple[Any, ...]]:
    """What the flight recorder has of a rank that waits for another."""
    rank = begin()
    tensor = torch.zeros(3, 5, device="cuda")
    dist.all_reduce(tensor)
    dist.broadcast(tensor[0], 0)
    torch.cuda.synchronize()
    while {entry["state"] for entry in recorded()} != {"completed"}:
        time.sleep(0.01)  # the watchdog of torch's second engine looks once a second
    if rank == 0:
        dist.all_reduce(tensor, async_op=True)
        dist.broadcast(tensor[0], 0, async_op=True)
    found = [
        (entry["profiling_name"], entry["state"], entry["input_sizes"], entry["input_dtypes"])
        for entry in recorded()
    ]
    note("recorded")
    wait_for(go)
    abort_all()
    return found


def registered() -> list[float]:
    """A collective on memory that torch's allocator has made known to the communicator."""
    begin(eager=True)
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    found: list[float] = tensor.tolist()
    dist.destroy_process_group()
    return found


def version() -> list[int]:
    """The version that NCCL gives."""
    return list(dist.ProcessGroupNCCL.get_runtime_nccl_version())
