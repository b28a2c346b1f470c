"""State into a snapshot and back: every kind of value, every type of tensor, in place."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ncclops.restart.snapshot import Rng, SnapshotError, Snapshots, _objects
from ncclops.restart.snapshot._blobs import Blob, is_intact, lay_out, layout_of, read_header, unpack
from ncclops.restart.snapshot._copying import Copier, make_buffer
from ncclops.restart.snapshot._planning import Label
from ncclops.restart.snapshot._tree import flatten, unflatten


def blob_of(state: Any) -> Blob:
    header, rows, sources, nbytes = lay_out(state)
    blob = Blob(header, make_buffer(nbytes, sources))
    blob.draft = Label("own", 1, 5, 0, 1, 0, "", "", nbytes, "")
    Copier(overlaps=True).copy(blob, rows, sources, ())
    blob.seal()
    return blob


def kept(entries: dict[str, Any]) -> Blob:
    return blob_of({name: _objects.state_of(entry) for name, entry in entries.items()})


def load(entries: dict[str, Any], blob: Blob) -> None:
    _objects.load(entries, blob, entries)


def round_trip(before: dict[str, Any], after: dict[str, Any]) -> None:
    load(after, kept(before))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_with_their_types(state: Any) -> None:
    text, leaves = flatten(state)
    back = unflatten(text, [tensor for _, tensor in leaves])
    assert back == state
    assert repr(back) == repr(state), "True is no 1, a tuple no list, -0.0 no 0.0"


@pytest.mark.parametrize(
    "value",
    [
        Counter({30: 1}),
        defaultdict(list, a=[1]),
        defaultdict(None, {1: 2}),
        OrderedDict(b=1, a=2),
        {1, 2},
        frozenset({3}),
        1 + 2j,
        2**200,
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        random.Random(3).getstate(),
        numpy.random.default_rng(3).bit_generator.state,
    ],
)
def test_what_torchs_schedulers_and_generators_hold_comes_back(value: Any) -> None:
    back = unpack(blob_of([value]), lambda tensor, _: tensor)[0]
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, defaultdict):
        assert back.default_factory is value.default_factory


def test_a_default_is_kept_where_the_state_is_new() -> None:
    """In a new process, and in what an object's ``load_state_dict`` is given."""

    class Counts:
        def __init__(self) -> None:
            self.seen: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    before = {"counts": Counts(), "entry": {"later": defaultdict(int, a=1)}}
    before["counts"].seen = defaultdict(list, a=[1])  # type: ignore[attr-defined]
    after: dict[str, Any] = {"counts": Counts(), "entry": {}}
    round_trip(before, after)
    after["counts"].seen["b"].append(2)
    assert after["counts"].seen == {"a": [1], "b": [2]}
    assert after["entry"]["later"]["b"] == 0


def test_a_default_of_one_s_own_is_that_of_the_object_that_is_there() -> None:
    before = {"entry": {"a": defaultdict(lambda: 7, x=1), "b": defaultdict(lambda: 7, x=1)}}
    after: dict[str, Any] = {"entry": {"a": defaultdict(lambda: 8)}}
    round_trip(before, after)
    assert after["entry"] == before["entry"]
    assert after["entry"]["a"]["y"] == 8
    assert type(after["entry"]["b"]) is dict, "nobody knows the function any more"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool,
              torch.complex64, torch.float8_e4m3fn]
)  # fmt: skip
def test_tensors_of_each_type_and_shape_come_back_to_the_bit(dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (4, 6)).to(dtype)
    state = {"scalar": whole[0, 0], "none": whole[:0], "turned": whole.t(), "part": whole[:, ::2]}
    back = unpack(blob_of(state), lambda tensor, _: tensor)
    for name, tensor in state.items():
        assert back[name].dtype is dtype
        assert back[name].shape == tensor.shape
        assert (
            back[name].contiguous().view(torch.uint8).tolist()
            == (tensor.contiguous().view(torch.uint8).tolist())
            if tensor.dim()
            else back[name].item() == tensor.item()
        )


def test_arrays_and_numbers_of_numpy_come_back() -> None:
    state = {
        "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
        "number": numpy.float32(2.5),
    }
    entry: dict[str, Any] = {}
    load({"e": entry}, blob_of({"e": state}))
    assert (entry["array"] == state["array"]).all()
    assert entry["array"].dtype == numpy.int16
    assert type(entry["number"]) is numpy.float32


def test_what_is_not_kept_is_named_by_its_path() -> None:
    with pytest.raises(SnapshotError, match=r"state\['a'\]\[1\] is a builtins\.object"):
        flatten({"a": [1, object()]})
    with pytest.raises(SnapshotError, match="does it hold itself"):
        itself: list[Any] = []
        itself.append(itself)
        flatten(itself)
    with pytest.raises(SnapshotError, match="records: not kept"):
        flatten([numpy.zeros(2, dtype=[("a", "i4")])])
    with pytest.raises(SnapshotError, match=r"state\[0\] is a Tensor, a kind of tensor"):
        lay_out([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])])


def test_a_module_an_optimizer_and_generators_go_on_as_if_nothing_had_been() -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        own = {"count": 0, "seen": [1]}
        return {"m": model, "o": optimizer, "s": scheduler, "rng": Rng(), "own": own}

    def train(objects: dict[str, Any], steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = torch.rand(3, 4) + random.random() + numpy.random.rand()
            objects["o"].zero_grad()
            loss = objects["m"](batch).square().mean()
            loss.backward()
            objects["o"].step()
            objects["s"].step()
            objects["own"]["count"] += 1
            losses.append(loss.item())
        return losses

    first = make()
    train(first, 3)
    blob = kept(first)
    expected = train(first, 3)
    second = make()
    parameters = list(second["m"].parameters())
    train(second, 1)
    load(second, blob)
    assert train(second, 3) == expected
    assert second["own"]["count"] == 6
    assert all(a is b for a, b in zip(parameters, second["m"].parameters(), strict=True))
    assert is_intact(blob), "what was loaded does not share its memory"


def test_extra_state_of_a_module_is_loaded() -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    before, after = Counting(2, 2), Counting(2, 2)
    before.seen = 7
    load({"m": after}, kept({"m": before}))
    assert after.seen == 7
    assert torch.equal(before.weight, after.weight)


class ExtraTensor(nn.Linear):
    """Has an extra state as a tensor of any size, as layers in FP8 have."""

    def __init__(self, *seen: int) -> None:
        super().__init__(2, 2)
        self.seen = list(seen)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state.tolist()


@pytest.mark.parametrize("seen", [(1,), (), (4, 5)])
def test_extra_state_that_is_a_tensor_is_loaded_whatever_its_size(seen: tuple[int, ...]) -> None:
    before, after = ExtraTensor(7, 8), ExtraTensor(*seen)
    round_trip({"m": before}, {"m": after})
    assert after.seen == [7, 8]
    layouts = {layout_of(_objects.fixed_states({"m": each})) for each in (before, ExtraTensor())}
    assert len(layouts) == 1, "it is no part of what has its size from the beginning"


def test_a_module_whose_state_is_a_copy_is_loaded_in_its_own_way() -> None:
    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

        def copy_each(_: Any, state: dict[str, Any], *__: Any) -> dict[str, Any]:
            return {name: tensor.clone() for name, tensor in state.items()}

        model._register_state_dict_hook(copy_each)
        return model

    before, after = made(), made()
    round_trip({"m": before}, {"m": after})
    expected = before.state_dict()
    assert all(torch.equal(expected[name], each) for name, each in after.state_dict().items())


def test_a_module_that_drops_what_it_has_given_is_refused() -> None:
    class Renames(nn.Linear):
        def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"w": self.weight.detach().clone()}

    with pytest.raises(SnapshotError, match="'m' does not load what it has given"):
        round_trip({"m": Renames(2, 2)}, {"m": Renames(2, 2)})


def test_what_dictionaries_and_lists_hold_is_put_back_into_the_same_objects() -> None:
    def made(value: float) -> tuple[nn.Module, dict[str, Any]]:
        model = nn.Linear(2, 2)
        entries = {
            "model": model.state_dict(),
            "parts": list(model.parameters()),
            "own": {
                "total": torch.full((2,), value),
                "seen": numpy.full(2, value),
                "counts": defaultdict(int, a=int(value)),
                "pair": (torch.full((1,), value), [value]),
            },
        }
        return model, entries

    before, kept_entries = made(1.0)
    after, entries = made(2.0)
    own = dict(entries["own"])
    inner = own["pair"]
    round_trip(kept_entries, entries)
    assert torch.equal(before.weight, after.weight)
    assert torch.equal(before.bias, after.bias)
    assert own["total"].tolist() == own["seen"].tolist() == [1.0, 1.0]
    assert own["counts"] == {"a": 1}
    assert own["counts"]["b"] == 0
    assert (inner[0].item(), inner[1]) == (1.0, [1.0])


def test_an_object_that_stands_in_two_places_has_the_value_of_one() -> None:
    """Until there is a best one, the present weights stand for it, and one list for two."""

    def made() -> dict[str, Any]:
        model, empty = nn.Linear(2, 2), list[int]()
        return {"best": model.state_dict(), "model": model, "lists": [empty, empty]}

    before = made()
    before["best"] = copy.deepcopy(before["best"])
    with torch.no_grad():
        before["model"].weight.zero_()
    before["lists"] = [[1], [2]]
    after = made()
    round_trip(before, after)
    assert torch.equal(after["model"].weight, before["model"].weight)
    assert torch.equal(after["best"]["weight"], before["best"]["weight"])
    assert after["lists"] == [[1], [2]]


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "not there yet"])
def test_what_stood_in_two_places_is_one_object_again(is_there: bool) -> None:
    def made(value: int) -> dict[str, Any]:
        seen, sums = [value], {"n": torch.full((2,), float(value)), "a": numpy.full(2, value)}
        return {"seen": seen, "also": [seen, (sums, sums)], "n": sums["n"], "a": sums["a"]}

    after = made(2) if is_there else dict[str, Any]()
    round_trip({"e": made(1)}, {"e": after})
    again, (first, second) = after["also"]
    assert again is after["seen"]
    assert first is second
    assert (after["n"], after["a"]) == (first["n"], first["a"])
    assert (again, first["n"].tolist(), first["a"].tolist()) == ([1], [1.0, 1.0], [1, 1])


def test_what_a_sampler_gives_twice_it_gets_as_one() -> None:
    class Sampler:
        state: dict[str, Any]

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    before, after, order = Sampler(), Sampler(), [3, 1, 2]
    before.state = {"order": order, "left": (order, torch.ones(1))}
    round_trip({"s": before}, {"s": after})
    assert after.state["left"][0] is after.state["order"]
    assert after.state["order"] == order


def test_what_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append([endless])
    with pytest.raises(SnapshotError, match="does it hold itself"):
        flatten(endless)


@pytest.mark.parametrize("name", ["expanded", "measured"])
def test_buffers_of_each_kind_are_written_in_place(name: str) -> None:
    def made(value: float) -> nn.Module:
        module = nn.Linear(2, 2)
        with torch.inference_mode(name == "measured"):
            held = torch.tensor([value, float("nan"), 0.0])
        module.register_buffer(name, held.expand(5, 3) if name == "expanded" else held)
        return module

    before, after = made(1.0), made(2.0)
    there = after.get_buffer(name)
    round_trip({"m": before}, {"m": after})
    assert after.get_buffer(name) is there
    assert there.view(-1, 3)[0, 0] == 1.0
    torch.testing.assert_close(there, before.get_buffer(name), equal_nan=True)


def test_an_expanded_tensor_is_refused_what_it_cannot_hold() -> None:
    entry = torch.zeros(1).expand(2)
    with pytest.raises(SnapshotError, match="t is expanded, with one element for several"):
        round_trip({"t": torch.tensor([1.0, 2.0])}, {"t": entry})


def test_what_cannot_be_written_to_is_replaced() -> None:
    with torch.inference_mode():
        measured = torch.zeros(2)
    fixed = numpy.zeros(2)
    fixed.flags.writeable = False
    ones = {"a": torch.ones(2), "b": torch.ones(2), "c": numpy.ones(2), "d": torch.ones(2)}
    two = torch.tensor([1.0, 2.0])
    entry = {"a": measured, "b": torch.zeros(1).expand(2), "c": fixed, "d": torch.zeros(3)}
    round_trip({"e": ones | {"b": two}}, {"e": entry})
    assert entry.pop("b").tolist() == [1.0, 2.0]
    assert all(each.tolist() == [1.0, 1.0] for each in entry.values())


def test_an_optimizer_s_states_keep_their_type() -> None:
    """torch casts them to that of the parameter."""

    class Averages(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["average"] = torch.full((2,), 1 / 3)

    def made() -> Averages:
        return Averages([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], lr=0.1)

    before, after = made(), made()
    before.step()
    round_trip({"o": before}, {"o": after})
    (state,) = after.state.values()
    assert state["average"].dtype is torch.float32
    assert state["average"].tolist() == torch.full((2,), 1 / 3).tolist()


def test_a_model_that_has_become_another_one_is_refused() -> None:
    blob = kept({"m": nn.Linear(2, 2)})
    with pytest.raises(SnapshotError, match="has the shape"):
        load({"m": nn.Linear(3, 2)}, blob)
    with pytest.raises(SnapshotError, match="other names"):
        load({"m": nn.Linear(2, 2, bias=False)}, blob)
    first, second = ({"m": _objects.state_of(nn.Linear(width, 2))} for width in (2, 3))
    assert layout_of(first) != layout_of(second)


def test_generators_of_a_sampler_are_kept_beside_those_of_the_process() -> None:
    own = (random.Random(1), numpy.random.default_rng(1), torch.Generator().manual_seed(1))
    rng = Rng(*own)
    state = copy.deepcopy(rng.state_dict())

    def draw() -> tuple[Any, ...]:
        return own[0].random(), own[1].random(), torch.rand((), generator=own[2]), torch.rand(())

    first = draw()
    rng.load_state_dict(state)
    assert draw() == first
    with pytest.raises(TypeError, match="no generator"):
        Rng(3)


def test_damage_is_found() -> None:
    blob = blob_of({"a": torch.arange(100)})
    assert is_intact(blob)
    blob.buffer[17] += 1
    assert not is_intact(blob)
    blob.buffer[17] -= 1
    blob.header = blob.header.replace(b"int64", b"int32")
    assert not is_intact(blob)


@pytest.mark.parametrize(
    "row",
    [
        ["int64", [2], 64, 16, None],
        ["int64", [-2], 0, -16, None],
        ["int64", [2], 0, 24, None],
        ["no_type", [2], 0, 16, None],
        ["int64", [2], 8, 16, None],
        "row",
    ],
)
def test_a_header_that_does_not_fit_its_content_is_refused(row: Any) -> None:
    import json

    with pytest.raises(ValueError, match="not the header of a snapshot"):
        read_header(json.dumps({"tree": {"tensor": 0}, "rows": [row]}).encode(), 64)


@pytest.mark.parametrize("text", ["[", "[1]", '{"pickle":"x"}', '{"dtype":"nn"}', '{"tensor":5}'])
def test_text_that_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        unflatten(text, [])


def test_parameters_that_make_no_sense_are_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="'n' is of type int"):
        Snapshots({"n": 3})
    for wrong in ({"replicated": ["x"]}, {"every": 0}, {"budget": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Snapshots({"model": model}, **wrong)
    for mistyped in ({"state": [model]}, {"replicated": "model"}, {"checkpoint": 3}):
        with pytest.raises(TypeError, match=next(iter(mistyped))):
            Snapshots(**({"state": {"model": model}} | mistyped))
    with pytest.raises(ValueError, match="nothing to keep"):
        Snapshots({})
    with pytest.raises(SnapshotError, match="call restore"):
        Snapshots({"model": model}).take(1)
    with pytest.raises(SnapshotError, match="outside of a wrapped function"):
        Snapshots({"model": model}).restore()


def test_gradients_of_an_interrupted_step_do_not_outlive_it() -> None:
    """A loop that clears them after its optimizer's step would add to them."""
    model, other = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([other], lr=0.1)
    in_state = torch.ones(2)
    model.bias.grad = in_state
    model.weight.grad, other.grad = torch.ones(2, 2), torch.ones(2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    entries = {"model": model, "optimizer": optimizer, "accumulated": [{"bias": in_state}]}
    Snapshots(entries, store=store, name="gradients").restore()
    assert model.weight.grad is None
    assert other.grad is None
    assert model.bias.grad is in_state


def test_a_scaler_of_an_interrupted_step_begins_the_next_one() -> None:
    """It had unscaled gradients, or updated: what it says of that twice, it refuses."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler, unused = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    off = torch.amp.GradScaler("cpu", enabled=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    entries = {"optimizer": optimizer, "scaler": scaler, "unused": unused, "off": off}
    for iteration, interrupted in enumerate((scaler.unscale_, scaler.step)):
        scaler.scale(weight.sum()).backward()
        interrupted(optimizer)
        prefixed = dist.PrefixStore(str(iteration), store)
        Snapshots(entries, store=prefixed, name="scaler").restore()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.get_scale(), unused.get_scale()) == (8.0, 65536.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"every": "5"}, "every='5': give a number of steps, or None"),
        ({"every": True}, "every=True: give a number of steps"),
        ({"budget": "2%"}, "budget='2%': give a share of the time, as 0.02"),
        ({"replicated": 3}, "replicated=3: give a list of names"),
        ({"memory_for_partner": "1G"}, "memory_for_partner='1G': give a number of bytes, or None"),
        ({"shard": 0}, "shard=0: give text"),
        ({"domain": 1}, "domain=1: give text, or None"),
        ({"name": None}, "name=None: give text"),
        ({"partner": "no"}, "partner='no': give True or False"),
        ({"state": {3: {}}}, "state has an entry under 3: give it a name"),
        ({"state": {"rng": Rng}}, r"'rng' is the class Rng: write Rng\(\)"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_to_give(given: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Snapshots(**({"state": {"counts": {}}} | given))


PLACEMENTS = [Replicate(), Shard(1), _StridedShard(0, split_factor=2)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["replica", "shard", "strided-shard"])
@pytest.mark.parametrize("written", [str, repr])
def test_each_placement_is_read_again(placement: Any, written: Callable[[Any], str]) -> None:
    """That of FSDP2 over tensor parallelism was kept and then refused, which ended the job."""
    again = _objects._placement(written(placement))
    assert (type(again), str(again)) == (type(placement), str(placement))
