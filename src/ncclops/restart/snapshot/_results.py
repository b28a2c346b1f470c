"""What ``Snapshots`` tells its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ncclops.restart.snapshot._agreement import Order
from ncclops.restart.snapshot._planning import Source


@dataclass(frozen=True)
class Restored:
    """What ``restore`` has come to; the same on all ranks but for ``source`` and ``units``.

    - ``step``: the step that the state is of; ``None``: there was nothing, and training begins.
    - ``source``: where this rank took its state from, the most distant of several. ``units`` says
      it for ``"own"`` and ``"shared"`` state.
    - ``ranks``: how many ranks took theirs from where. ``elsewhere``: which ranks did not take it
      from their own memory, up to 64 of them.
    - ``passed_over``: why no newer step could be had, or nothing from memory; "" if nothing was.
    """

    step: int | None
    source: Source
    units: Mapping[str, Source]
    ranks: Mapping[Source, int]
    elsewhere: Mapping[int, Source]
    passed_over: str

    def __str__(self) -> str:
        """One line for a log."""
        passed = f"; passed over {self.passed_over}" if self.passed_over else ""
        if self.step is None:
            return f"no state to restore: training begins{passed}"
        told = ", ".join(f"{source.value} {count}" for source, count in self.ranks.items())
        return f"step {self.step} from {self.source.value} (all ranks: {told}){passed}"


@dataclass(frozen=True)
class Overhead:
    """What snapshots have cost this rank since its latest ``restore``.

    ``share`` is that of all steps' time. ``every``: steps from one snapshot to the next, as agreed
    last. ``own_bytes`` and ``copied_bytes``: host memory for this rank's snapshots, and for the
    copies that it keeps for another one.
    """

    share: float
    cost_s: float
    step_s: float
    steps: int
    snapshots: int
    every: int
    own_bytes: int
    copied_bytes: int


def restored_by(order: Order, step: int | None, units: Mapping[str, Source]) -> Restored:
    """What ``order`` has come to on this rank: ``step``, and the source of each of its units."""
    from_memory = order.moment is not None
    world = sum(order.sources.values())
    every = Source.NOTHING if step is None else Source.CHECKPOINT
    found = list(units.values())
    source = max(found, key=list(Source).index) if found else Source.NOTHING
    return Restored(
        step=step,
        source=source,
        units=dict(units),
        ranks={Source(k): v for k, v in order.sources.items()} if from_memory else {every: world},
        elsewhere={r: Source(s) for r, s in order.elsewhere.items()} if from_memory else {},
        passed_over=order.missing,
    )
