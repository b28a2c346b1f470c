"""What a user gives to be kept, and how its state is read and put back, in place.

A module's tensors are copied into those that it has: no second model is on the device at any time,
and whoever refers to a parameter goes on with it. What its ``state_dict`` has made for the occasion
(extra state, copies by a hook) goes through its ``load_state_dict``. Optimizers, schedulers,
samplers and whatever else has both get a copy on the host; an optimizer moves it to its parameters'
device itself. In dictionaries and lists tensors, arrays and inner containers stay the objects that
they are, as the function may hold them elsewhere: ``{"model": model.state_dict()}``.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ncclops.restart.snapshot._blobs import Blob, Row, is_sharded, unpack
from ncclops.restart.snapshot._errors import SnapshotError

if TYPE_CHECKING:
    from torch import Tensor

# How a mesh is found again: by the names of its dimensions, where it has some, as the number of
# replicas may have changed; otherwise by its shape. And by its type of device.
_MESH = tuple[tuple[object, ...], str]
# How torch ends the name of what get_extra_state() gives: often a tensor, of any size.
_EXTRA_STATE = "_extra_state"


def check(entries: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for an entry whose state could not be put back in place."""
    import torch

    for name, entry in entries.items():
        if not isinstance(name, str):
            raise TypeError(f"state has an entry under {name!r}: give it a name, as text")
        if isinstance(entry, type):
            raise TypeError(f"{name!r} is the class {entry.__name__}: write {entry.__name__}()")
        has_state = hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")
        if not has_state and not isinstance(entry, torch.Tensor | dict | list):
            raise TypeError(
                f"{name!r} is of type {type(entry).__qualname__}: give an object with state_dict() "
                "and load_state_dict(), a tensor, a dictionary or a list, so that its state can be "
                "put back into it"
            )


def state_of(entry: Any) -> Any:
    """The present state of one entry; tensors in it are those of the entry, not copies."""
    return entry.state_dict() if hasattr(entry, "state_dict") else entry


def fixed_states(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What has its size from the beginning: tensors of modules, and tensors as such; by name."""
    import torch

    found: dict[str, Any] = {}
    for name, entry in entries.items():
        if isinstance(entry, torch.nn.Module):
            found[name] = {
                k: v
                for k, v in entry.state_dict().items()
                if isinstance(v, torch.Tensor) and not k.endswith(_EXTRA_STATE)
            }
        elif isinstance(entry, torch.Tensor):
            found[name] = entry
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


def load(entries: Mapping[str, Any], blob: Blob, all_entries: Mapping[str, Any]) -> None:
    """Put the state in ``blob`` back into ``entries``, in place. ``all_entries`` has also those
    that are kept in another blob.

    Raises ``SnapshotError`` where an entry has become another one than that which was kept.
    """
    import torch

    meshes = _meshes(entries)
    kept = unpack(blob, _Kept)
    if set(kept) != set(entries):
        raise SnapshotError(f"kept was {sorted(kept)}, and to be restored is {sorted(entries)}")
    in_place = _InPlace(meshes, all_entries)
    with torch.no_grad():
        for name, entry in entries.items():
            if isinstance(entry, torch.nn.Module):
                _load_module(name, entry, kept[name], meshes)
            elif isinstance(entry, torch.Tensor):
                _copy_into(name, entry, kept[name])
            elif isinstance(entry, dict | list):
                in_place.fill(entry, kept[name])
            elif isinstance(entry, torch.optim.Optimizer):
                _load_optimizer(name, entry, kept[name], meshes)
            else:
                entry.load_state_dict(_copies(kept[name], meshes))


def drop_interrupted_step(entries: Mapping[str, Any]) -> None:
    """Leave nothing of an interrupted step on objects in ``entries`` that outlive a fault.

    No gradient on any parameter, but for those that are in the state: a loop that clears gradients
    after its optimizer's step, and not before its backward pass, would add to them. And no
    ``GradScaler`` that has unscaled or stepped, which its state does not tell: it would refuse to
    in the next step.
    """
    _begin_steps_of_scalers(entries)
    held = {id(each) for entry in entries.values() for each in _plain_tensors(entry)}
    for parameter in _tensors(entries):
        if parameter.grad is not None and id(parameter.grad) not in held:
            parameter.grad = None


def _begin_steps_of_scalers(entries: Mapping[str, Any]) -> None:
    import torch

    for entry in entries.values():
        if isinstance(entry, torch.amp.GradScaler) and entry.is_enabled():
            with contextlib.suppress(AssertionError, AttributeError):  # it has scaled nothing yet
                entry.update(entry.get_scale())


def modes_of(entries: Mapping[str, Any]) -> dict[str, list[bool]]:
    """Whether each part of each module trains or evaluates: no ``state_dict`` has that."""
    import torch

    return {
        name: [part.training for part in entry.modules()]
        for name, entry in entries.items()
        if isinstance(entry, torch.nn.Module)
    }


def put_back_modes(entries: Mapping[str, Any], modes: Mapping[str, Sequence[bool]]) -> None:
    """``modes_of`` as it was, for modules that were interrupted while they evaluated."""
    for name, was in modes.items():
        parts = [*entries[name].modules()] if name in entries else []
        if len(parts) == len(was):
            for part, trains in zip(parts, was, strict=True):
                part.training = trains


def _plain_tensors(entry: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries and sequences."""
    import torch

    if isinstance(entry, torch.Tensor):
        yield entry
    elif isinstance(entry, dict | list | tuple):
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from _plain_tensors(each)


class _Kept:
    """A tensor in the buffer of a snapshot, in the place of one in a state."""

    def __init__(self, tensor: Tensor, row: Row) -> None:
        self.tensor, self.row = tensor, row

    def numpy(self) -> Any:
        """The content, for arrays of numpy."""
        return self.tensor.numpy()


def _load_module(name: str, module: Any, kept: Any, meshes: Mapping[_MESH, Any]) -> None:
    present = module.state_dict()
    if set(present) != set(kept):
        other = sorted(set(present) ^ set(kept))
        raise SnapshotError(f"{name!r} has other names than were kept: {other[:4]}")
    own = {_storage(each) for each in (*module.parameters(), *module.buffers())}
    rest = {}
    for key, value in kept.items():
        is_own = not key.endswith(_EXTRA_STATE) and _storage(present[key]) in own
        if isinstance(value, _Kept) and is_own:
            _copy_into(f"{name}.{key}", present[key], value)
        else:
            rest[key] = _copies(value, meshes, on_host=not key.endswith(_EXTRA_STATE))
    if rest:
        told = module.load_state_dict(rest, strict=False)
        if refused := getattr(told, "unexpected_keys", None):
            raise SnapshotError(f"{name!r} does not load what it has given: {refused[:4]}")


def _storage(tensor: Any) -> int | None:
    """Where the memory begins that ``tensor`` is in; ``None`` where it is no ordinary tensor."""
    import torch

    local = tensor.to_local() if is_sharded(tensor) else tensor
    if not isinstance(local, torch.Tensor) or local.layout != torch.strided:
        return None
    return int(local.untyped_storage().data_ptr())


def _load_optimizer(name: str, optimizer: Any, kept: Any, meshes: Mapping[_MESH, Any]) -> None:
    """torch casts each state to the type of its parameter: an average in fp32 to bf16."""
    import torch

    copies = {k: _copies(v, meshes, on_host=k == "state") for k, v in kept.items()}
    try:
        optimizer.load_state_dict(copies)
    except ValueError as error:  # groups, or parameters in them, are more or fewer
        raise SnapshotError(
            f"{name!r} does not take back what was kept of it ({error}): groups of parameters that "
            "come in mid-training have to be there before restore()"
        ) from error
    loaded = optimizer.state_dict().get("state", {})  # the dictionaries that the optimizer has
    for parameter, states in kept.get("state", {}).items():
        for key, value in states.items() if isinstance(states, dict) else ():
            now = loaded.get(parameter, {}).get(key)
            cast = isinstance(value, _Kept) and isinstance(now, torch.Tensor)
            if cast and now.dtype != value.tensor.dtype:
                loaded[parameter][key] = _copy(value, meshes, on_host=True).to(now.device)


class _InPlace:
    """Puts state back into dictionaries and lists, of which every object stays that it can.

    An object that two places had is one in both again. One that they have now and had not, such as
    one that stands for a value which is not there yet, or a parameter of a module that is kept as
    well, has one value: the second place gets an object of its own.
    """

    def __init__(self, meshes: Mapping[_MESH, Any], all_entries: Mapping[str, Any]) -> None:
        self._meshes = meshes
        self._written = {
            _address(each) for each in _loaded_elsewhere(all_entries) if _storage(each) is not None
        }
        self._put_already: dict[int, Any] = {}  # by the id of what was kept

    def fill(self, present: Any, kept: Any) -> None:
        """Put ``kept``, a dictionary, a list or an array, into ``present``."""
        if isinstance(kept, dict):
            content = {key: self._put(present.get(key), value) for key, value in kept.items()}
            present.clear()
            present.update(content)
        elif isinstance(kept, list):
            there = [*present, *[None] * len(kept)]
            present[:] = [self._put(was, value) for was, value in zip(there, kept, strict=False)]
        else:
            present[...] = kept

    def _put(self, present: Any, kept: Any) -> Any:
        """What stands in the place of ``present`` from now on."""
        if isinstance(kept, tuple) and type(present) is tuple and len(present) == len(kept):
            return tuple(map(self._put, present, kept))
        if id(kept) in self._put_already:
            return self._put_already[id(kept)]
        if isinstance(kept, _Kept):
            put = self._tensor(present, kept)
        elif not _is_alike(present, kept) or self._was_written(id(present)):
            return _copies(kept, self._meshes, made=self._put_already)
        else:
            put = present
            self.fill(present, kept)
        self._put_already[id(kept)] = put
        return put

    def _tensor(self, present: Any, kept: _Kept) -> Any:
        import torch

        fits = isinstance(present, torch.Tensor) and is_sharded(present) == (
            kept.row.sharded is not None
        )
        local = (present.to_local() if is_sharded(present) else present) if fits else None
        if (
            local is None
            or (local.dtype, local.shape) != (kept.tensor.dtype, kept.tensor.shape)
            or self._was_written(_address(present))
            or not _write(local, kept.tensor)
        ):
            return _copy(kept, self._meshes)
        return present

    def _was_written(self, where: int) -> bool:
        """Whether it was before; it is now."""
        before = where in self._written
        self._written.add(where)
        return before


def _is_alike(present: Any, kept: Any) -> bool:
    """Whether ``kept``, of a dictionary, a list or an array, can be put into ``present``."""
    if isinstance(kept, dict | list):
        return isinstance(present, type(kept))
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(kept, numpy.ndarray)
        and isinstance(present, numpy.ndarray)
        and (present.dtype, present.shape) == (kept.dtype, kept.shape)
        and bool(present.flags.writeable)
    )


def _copy_into(name: str, target: Any, kept: Any) -> None:
    local = target.to_local() if is_sharded(target) else target
    if not isinstance(kept, _Kept) or local.shape != kept.tensor.shape:
        was = tuple(kept.tensor.shape) if isinstance(kept, _Kept) else type(kept).__name__
        raise SnapshotError(f"{name} has the shape {tuple(local.shape)}, and kept was {was}")
    if not _write(local, kept.tensor):
        raise SnapshotError(f"{name} is expanded, with one element for several that were kept")


def _write(target: Tensor, content: Tensor) -> bool:
    """Copy ``content`` into ``target``, of the same shape, and of any kind that a script can have.

    False, and nothing is written: several elements of ``target`` are one, and those of ``content``
    differ.
    """
    import torch

    once, single = content, target
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            once, single = once.narrow(dim, 0, 1), single.narrow(dim, 0, 1)
    if once.shape != content.shape:
        expanded = once.expand_as(content).contiguous()
        if not torch.equal(expanded.view(torch.uint8), content.contiguous().view(torch.uint8)):
            return False
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        single.copy_(once)
    return True


def _copies(
    state: Any,
    meshes: Mapping[_MESH, Any],
    *,
    on_host: bool = False,
    made: dict[int, Any] | None = None,
) -> Any:
    """``state`` with tensors of their own: what is loaded may keep what it is given.

    They are on the type of device that they were on, or all on the host: for who puts them into
    tensors of its own, and would have two of each on the device meanwhile. ``made`` has, by the id
    of what was kept, what stands for it: an object in two places stays one.
    """
    made = {} if made is None else made
    if id(state) in made:
        return made[id(state)]
    copied: Any
    if isinstance(state, _Kept):
        copied = _copy(state, meshes, on_host=on_host)
    elif isinstance(state, dict):
        copied = copy.copy(state)  # a default comes along
        copied.clear()
        for key, value in state.items():
            copied[key] = _copies(value, meshes, on_host=on_host, made=made)
    elif isinstance(state, list | tuple | set | frozenset):
        items = (_copies(each, meshes, on_host=on_host, made=made) for each in state)
        copied = type(state)(items)
    else:
        return state
    made[id(state)] = copied
    return copied


def _copy(kept: _Kept, meshes: Mapping[_MESH, Any], *, on_host: bool = False) -> Any:
    sharded = kept.row.sharded
    if sharded is None:
        return kept.tensor.to("cpu" if on_host else kept.row.device, copy=True)
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
    """What ``str`` of a placement says: ``R`` or ``S(0)``, in some versions ``Replicate()``...

    ``_S(0, 2)`` is of a tensor that is cut by tensor parallelism and again, within that, by FSDP2.
    """
    from torch.distributed.tensor import Replicate, Shard

    if text in ("R", "Replicate()"):
        return Replicate()
    head, _, rest = text.partition("(")
    numbers = [each.strip().rpartition("=")[2] for each in rest.rstrip(")").split(",")]
    if all(each.isdecimal() for each in numbers):
        if head in ("S", "Shard") and len(numbers) == 1:
            return Shard(int(numbers[0]))
        if head in ("_S", "_StridedShard") and len(numbers) == 2:
            from torch.distributed.tensor.placement_types import _StridedShard  # not public

            return _StridedShard(int(numbers[0]), split_factor=int(numbers[1]))
    raise SnapshotError(f"a tensor was kept with the placement {text!r}: only shards and replicas")


def _loaded_elsewhere(entries: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a state is put into where it is not that of a dictionary or a list."""
    import torch

    for entry in entries.values():
        if isinstance(entry, torch.nn.Module):
            yield from entry.parameters()
            yield from entry.buffers()
        elif isinstance(entry, torch.Tensor):
            yield entry


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
