"""What a user gives to be kept, and how its state is read and put back, in place.

A module's tensors are copied into those that it has: no second model is on the device at any time,
and whoever refers to a parameter goes on with it. Optimizers, schedulers, samplers and whatever
else has ``state_dict`` and ``load_state_dict`` get a copy on the host; an optimizer moves it to its
parameters' device itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ncclops.restart.snapshot._blobs import Blob, Row, is_sharded, unpack
from ncclops.restart.snapshot._errors import SnapshotError

if TYPE_CHECKING:
    from torch import Tensor

# How a mesh is found again: by the names of its dimensions, where it has some, as the number of
# replicas may have changed; otherwise by its shape. And by its type of device.
_MESH = tuple[tuple[object, ...], str]


def check(entries: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for an entry whose state could not be put back in place."""
    import torch

    for name, entry in entries.items():
        has_state = hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")
        if not has_state and not isinstance(entry, torch.Tensor | dict | list):
            raise TypeError(
                f"{name!r} is a {type(entry).__qualname__}: give an object with state_dict() and "
                "load_state_dict(), a tensor, a dictionary or a list, so that its state can be "
                "put back into it"
            )


def state_of(entry: Any) -> Any:
    """The present state of one entry; tensors in it are those of the entry, not copies."""
    return entry.state_dict() if hasattr(entry, "state_dict") else entry


def fixed_states(entries: Mapping[str, Any]) -> list[Any]:
    """What has its size from the beginning: tensors of modules, and tensors as such."""
    import torch

    found: list[Any] = []
    for entry in entries.values():
        if isinstance(entry, torch.nn.Module):
            state = entry.state_dict()
            found.append({k: v for k, v in state.items() if isinstance(v, torch.Tensor)})
        elif isinstance(entry, torch.Tensor):
            found.append(entry)
    return found


def changed_by_steps(entries: Mapping[str, Any]) -> set[int]:
    """The addresses of tensors that only an optimizer's step changes."""
    import torch

    found: set[int] = set()
    for entry in entries.values():
        if not isinstance(entry, torch.optim.Optimizer):
            continue
        for group in entry.param_groups:
            found |= {_address(each) for each in group["params"]}
        for state in entry.state.values():
            found |= {_address(v) for v in state.values() if isinstance(v, torch.Tensor)}
    return found


def _address(tensor: Any) -> int:
    local = tensor.to_local() if is_sharded(tensor) else tensor
    return int(local.data_ptr())


def load(entries: Mapping[str, Any], blob: Blob) -> None:
    """Put the state in ``blob`` back into ``entries``, in place.

    Raises ``SnapshotError`` where an entry has become another one than that which was kept.
    """
    import torch

    meshes = _meshes(entries)
    kept = unpack(blob, _Kept)
    if set(kept) != set(entries):
        raise SnapshotError(f"kept was {sorted(kept)}, and to be restored is {sorted(entries)}")
    with torch.no_grad():
        for name, entry in entries.items():
            if isinstance(entry, torch.nn.Module):
                _load_module(name, entry, kept[name])
            elif isinstance(entry, torch.Tensor):
                _copy_into(name, entry, kept[name])
            elif isinstance(entry, dict):
                entry.clear()
                entry.update(_copies(kept[name], meshes))
            elif isinstance(entry, list):
                entry[:] = _copies(kept[name], meshes)
            else:
                entry.load_state_dict(_copies(kept[name], meshes))


class _Kept:
    """A tensor in the buffer of a snapshot, in the place of one in a state."""

    def __init__(self, tensor: Tensor, row: Row) -> None:
        self.tensor, self.row = tensor, row

    def numpy(self) -> Any:
        """The content, for arrays of numpy."""
        return self.tensor.numpy()


def _load_module(name: str, module: Any, kept: Any) -> None:
    present = module.state_dict()
    if set(present) != set(kept):
        other = sorted(set(present) ^ set(kept))
        raise SnapshotError(f"{name!r} has other names than were kept: {other[:4]}")
    rest = {}
    for key, value in kept.items():
        if isinstance(value, _Kept):
            _copy_into(f"{name}.{key}", present[key], value)
        else:
            rest[key] = _copies(value, {})
    if rest:  # get_extra_state()
        module.load_state_dict(rest, strict=False)


def _copy_into(name: str, target: Any, kept: Any) -> None:
    local = target.to_local() if is_sharded(target) else target
    if not isinstance(kept, _Kept) or local.shape != kept.tensor.shape:
        was = tuple(kept.tensor.shape) if isinstance(kept, _Kept) else type(kept).__name__
        raise SnapshotError(f"{name} has the shape {tuple(local.shape)}, and kept was {was}")
    local.copy_(kept.tensor)


def _copies(state: Any, meshes: Mapping[_MESH, Any]) -> Any:
    """``state`` with tensors of their own: what is loaded may keep what it is given."""
    if isinstance(state, _Kept):
        return _copy(state, meshes)
    if isinstance(state, dict):
        made = type(state)()
        for key, value in state.items():
            made[key] = _copies(value, meshes)
        return made
    if isinstance(state, list | tuple | set | frozenset):
        return type(state)(_copies(each, meshes) for each in state)
    return state


def _copy(kept: _Kept, meshes: Mapping[_MESH, Any]) -> Any:
    sharded = kept.row.sharded
    if sharded is None:
        return kept.tensor.clone()
    from torch.distributed.tensor import DTensor

    shape, names, device = sharded["mesh"]
    wanted = (tuple(names or shape), device)
    if wanted not in meshes:
        raise SnapshotError(
            f"a tensor was kept over a mesh {names or ''} of {shape} on {device}, which no module "
            "that is restored has now"
        )
    mesh, (whole, placements) = meshes[wanted], (sharded["shape"], sharded["placements"])
    stride, strides = 1, list[int]()
    for length in reversed(whole):
        strides.insert(0, stride)
        stride *= length
    return DTensor.from_local(
        kept.tensor.to(device, copy=True),
        mesh,
        [_placement(each) for each in placements],
        run_check=False,
        shape=_size(whole),
        stride=tuple(strides),
    )


def _size(lengths: list[int]) -> Any:
    import torch

    return torch.Size(lengths)


def _placement(text: str) -> Any:
    """What ``str`` of a placement says: ``R`` or ``S(0)``, in some versions ``Replicate()``..."""
    from torch.distributed.tensor import Replicate, Shard

    if text in ("R", "Replicate()"):
        return Replicate()
    head, _, rest = text.partition("(")
    number = rest.rstrip(")").removeprefix("dim=")
    if head in ("S", "Shard") and number.isdecimal():
        return Shard(int(number))
    raise SnapshotError(f"a tensor was kept with the placement {text!r}: only shards and replicas")


def _meshes(entries: Mapping[str, Any]) -> dict[_MESH, Any]:
    found: dict[_MESH, Any] = {}
    for tensor in _tensors(entries):
        if is_sharded(tensor):
            mesh = tensor.device_mesh
            found[tuple(mesh.mesh_dim_names or mesh.mesh.shape), mesh.device_type] = mesh
    return found


def _tensors(entries: Mapping[str, Any]) -> Iterator[Any]:
    import torch

    for entry in entries.values():
        if isinstance(entry, torch.nn.Module):
            yield from entry.parameters()
        elif isinstance(entry, torch.optim.Optimizer):
            for group in entry.param_groups:
                yield from group["params"]
        elif isinstance(entry, torch.Tensor):
            yield entry
