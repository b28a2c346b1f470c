"""One unit of a rank's state on the host: a header that describes it, and one buffer.

The buffer is one piece, pinned where CUDA is in use: it is allocated once, copied to at the full
rate of the bus, and sent as it is. The header (JSON) has the tree of values (``_tree``) and a row
for each tensor: its type, shape and place in the buffer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ncclops.restart.snapshot._errors import SnapshotError
from ncclops.restart.snapshot._planning import Label
from ncclops.restart.snapshot._room import local_ranks
from ncclops.restart.snapshot._tree import flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

# Each tensor begins at a multiple of this, as wide as a line of the cache.
_ALIGNMENT = 64
_CHUNK_BYTES = 16 * 2**20
# A restart waits for the check; a snapshot is checked in the background, by one thread. A core does
# some 2 GB/s.
_MOST_CHECKING_THREADS = 16


@dataclass(eq=False)
class Blob:
    """One unit of a rank's state.

    ``label`` is set once it is complete: then it never changes. Until then ``draft`` has the label
    without the checksum, which is computed in the background.
    """

    header: bytes
    buffer: Tensor
    label: Label | None = None
    draft: Label | None = None
    is_copied: bool = False  # all of it is in ``buffer``
    waits_for: list[Any] = field(default_factory=list)  # events of CUDA, until it is

    @property
    def nbytes(self) -> int:
        """The size of the buffer."""
        return int(self.buffer.numel())

    def view(self) -> memoryview:
        """The buffer as bytes; valid as long as this object."""
        if not self.nbytes:
            return memoryview(b"")
        # Not by numpy, which torch runs without.
        memory = (ctypes.c_char * self.nbytes).from_address(self.buffer.data_ptr())
        return memoryview(memory).cast("B")

    def seal(self, threads: int = 1) -> None:
        """All is copied: compute the checksum, and put the label on it."""
        if self.label is None and self.draft is not None:
            found = digest(self.header, self.view(), threads)
            self.label = dataclasses.replace(self.draft, digest=found)


def digest(header: bytes, content: memoryview, threads: int = 1) -> str:
    """A checksum of both: it finds what was damaged, not what was forged."""
    whole = hashlib.blake2b(header, digest_size=8)
    if threads == 1:
        sums: Iterator[int] | list[int] = map(zlib.crc32, _chunks(content))
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="ncclops-snapshot") as pool:
            sums = list(pool.map(zlib.crc32, _chunks(content)))
    for each in sums:
        whole.update(each.to_bytes(4, "little"))
    return whole.hexdigest()


def checking_threads() -> int:
    """This rank's share of the cores, while nothing else is done than to check."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(_MOST_CHECKING_THREADS, cores // local_ranks()))


def is_intact(blob: Blob) -> bool:
    """Whether the content is what the label says."""
    if blob.label is None or blob.nbytes != blob.label.nbytes:
        return False
    return digest(blob.header, blob.view(), checking_threads()) == blob.label.digest


def _chunks(content: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(content), _CHUNK_BYTES):
        yield content[begin : begin + _CHUNK_BYTES]


# --- the header -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One tensor in the buffer.

    ``sharded`` is set for a ``DTensor``, of which the buffer has the local part: the shape of the
    whole, its placements, and the mesh's shape, names and type of device. ``device`` is the type of
    the one that the tensor was on; its number may be another on the rank that it is restored on.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sharded: dict[str, Any] | None = None
    device: str = "cpu"


def lay_out(state: Any) -> tuple[bytes, list[Row], list[Any], int]:
    """The header of ``state``, a row and a source for each tensor, and the size of the buffer.

    Raises ``SnapshotError`` on what cannot be kept.
    """
    text, leaves = flatten(state)
    rows, sources, end = [], [], 0
    for path, leaf in leaves:
        local, sharded = _local(path, leaf)
        nbytes = local.numel() * local.element_size()
        dtype = str(local.dtype).removeprefix("torch.")
        rows.append(Row(dtype, tuple(local.shape), end, nbytes, sharded, local.device.type))
        sources.append(local)
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    table = [[r.dtype, list(r.shape), r.offset, r.nbytes, r.sharded, r.device] for r in rows]
    header = f'{{"tree":{text},"rows":{json.dumps(table, separators=(",", ":"))}}}'
    return header.encode(), rows, sources, end


def read_header(header: bytes, nbytes: int) -> tuple[str, list[Row]]:
    """The tree, as text, and the rows. Raises ``ValueError`` for what does not fit ``nbytes``."""
    import torch

    try:
        document = json.loads(header)
        rows = [
            Row(dtype, tuple(shape), offset, size, sharded, torch.device(device).type)
            for dtype, shape, offset, size, sharded, device in document["rows"]
        ]
        for row in rows:
            kind = getattr(torch, row.dtype)
            count = 1
            for length in row.shape:
                if length < 0:
                    raise ValueError("a negative length")
                count *= length
            if row.nbytes != count * kind.itemsize or not 0 <= row.offset <= nbytes - row.nbytes:
                raise ValueError("a tensor outside of the buffer")
            if row.offset % _ALIGNMENT:
                raise ValueError("a tensor that begins elsewhere")
        return json.dumps(document["tree"]), rows
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"not the header of a snapshot: {error}") from error


def tensor_of(buffer: Tensor, row: Row) -> Tensor:
    """The tensor of ``row``: it shares the memory of ``buffer``."""
    import torch

    dtype = getattr(torch, row.dtype)
    if not row.nbytes:
        return torch.empty(row.shape, dtype=dtype)
    return buffer[row.offset : row.offset + row.nbytes].view(dtype).view(row.shape)


def unpack(blob: Blob, wrap: Any) -> Any:
    """The state in ``blob``. ``wrap(tensor, row)`` gives what stands in a tensor's place."""
    text, rows = read_header(blob.header, blob.nbytes)
    return unflatten(text, [wrap(tensor_of(blob.buffer, row), row) for row in rows])


def _local(path: str, leaf: Any) -> tuple[Tensor, dict[str, Any] | None]:
    """The tensor that this rank holds of ``leaf``, and what it is a part of."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return torch.from_numpy(leaf), None
    leaf = leaf.detach()
    sharded = None
    if is_sharded(leaf):
        mesh = leaf.device_mesh
        sharded = {
            "shape": list(leaf.shape),
            "placements": [str(each) for each in leaf.placements],
            "mesh": [list(mesh.mesh.shape), list(mesh.mesh_dim_names or ()), mesh.device_type],
            "part": _part_of_mesh(leaf),
        }
        leaf = leaf.to_local()
    is_plain = type(leaf) is torch.Tensor or isinstance(leaf, torch.nn.Parameter)
    if not is_plain or leaf.is_nested:
        raise SnapshotError(
            f"{path[:200]} is a {type(leaf).__qualname__}, a kind of tensor that snapshots do not "
            "keep: give them its plain tensors"
        )
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type == "meta":
        raise SnapshotError(f"{path[:200]} is {leaf.layout} on {leaf.device}: not kept")
    return leaf, sharded


def is_sharded(leaf: Any) -> bool:
    """Whether ``leaf`` is a ``DTensor``."""
    return hasattr(leaf, "device_mesh") and hasattr(leaf, "placements")


def _part_of_mesh(leaf: Any) -> list[list[int]]:
    """For each dimension of the mesh that cuts the tensor, how many parts there are, and which."""
    mesh = leaf.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    return [
        [mesh.size(dim), coordinate[dim]]
        for dim, placement in enumerate(leaf.placements)
        if not placement.is_replicate()
    ]


def layout_of(states: Mapping[str, Any]) -> str:
    """A digest of the tensors of ``states``: types, shapes, and which part of them a rank has.

    Of a state that may be smaller at first, as an optimizer's, it says nothing: leave that out.
    """
    _, leaves = flatten(dict(states))
    described = []
    for path, leaf in leaves:
        local, sharded = _local(path, leaf)
        part = [sharded["shape"], sharded["part"]] if sharded is not None else None
        described.append([path, str(local.dtype), list(local.shape), part])
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=8).hexdigest()
