"""The status of a run for people: a few lines about the run, a table of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ncclops.live_view.overview import PHASES
from ncclops.live_view.words import duration, short
from ncclops.rank_lists import ranks_named
from ncclops.status.compare import SLOW_RATIO, WithoutStep, without_step
from ncclops.status.model import LastEvent, RankStatus, RunStatus

# As on the live screen, whose red is bold.
_STYLES = {phase: "bold red" if style == "red" else style for phase, style in PHASES.items()}
_COLUMNS = ("rank", "host", "phase", "step", "step time", "of median", "memory", "last event")
_LEFT = ("host", "phase")  # all others but the last are numbers
# Lines around the table: the run's, the table's head, the line about ranks left out, the cursor's.
_AROUND = 14
_LEAST_ROWS = 3


def draw(status: RunStatus, *, height: int | None = None) -> RenderableType:
    """``status`` as something rich can print; within ``height`` lines the most relevant ranks."""
    shown = status.ranks if height is None else _most_relevant(status.ranks, height - _AROUND)
    parts: list[RenderableType] = [*_about_run(status)]
    if shown:
        parts += _table(shown, status)
    if left := len(status.ranks) - len(shown):
        parts.append(Text(f"and {left} ranks that are no slower", style="dim"))
    return Group(*parts)


def _about_run(status: RunStatus) -> list[Text]:
    lines = [_headline(status), _progress(status)]
    if status.last_fault is not None:
        fault = status.last_fault
        where = "" if fault.rank is None else f" on rank {fault.rank}"
        ago = duration(max(0.0, status.as_of - fault.ts))
        lines.append(Text(f"last fault {ago} ago{where}: {fault.kind}: {fault.cause}"))
    for straggler in status.stragglers:
        kind = f" ({straggler.kind})" if straggler.kind else ""
        behind = f"{(straggler.ratio - 1):.0%} behind the median rank{kind}"
        lines.append(Text(f"straggler: rank {straggler.rank}, {behind}", style="yellow"))
    if late := without_step(status):
        lines.append(Text(no_step(late), style="yellow"))
    lines += [Text(note, style="yellow") for note in status.notes]
    return lines


def no_step(late: WithoutStep) -> str:
    """In a sentence."""
    where = "" if late.ranks is None else f" on {ranks_named(late.ranks)}"
    return f"no step{where} for {duration(late.seconds)}: `ncclops stacks` shows where each is"


def _headline(status: RunStatus) -> Text:
    line = Text(f"run {status.run_id}: ")
    line.append(status.outcome or status.phase, style=_STYLES.get(status.phase, "bold"))
    if status.reason:
        reason = status.reason.removeprefix(f"{status.outcome}: ")
        line.append(f" ({reason})")
    if status.seconds is not None:
        line.append(f" after {duration(status.seconds)}")
    if status.world_size is not None:
        nodes = f" on {len(status.nodes)} nodes" if len(status.nodes) > 1 else ""
        line.append(f", {status.world_size} rank{'s' * (status.world_size != 1)}{nodes}")
    if status.profile:
        line.append(f", profile {status.profile}")
    return line


def _progress(status: RunStatus) -> Text:
    parts = []
    if status.step is not None:
        parts.append(f"step {status.step}")
    if status.median_step_s is not None:
        parts.append(f"{short(status.median_step_s)} a step (median rank)")
    parts.append(f"{status.restarts} restart{'s' * (status.restarts != 1)} in place")
    parts.append(f"{status.attempt} with new processes")
    if status.goodput is not None and status.goodput.get("ratio") is not None:
        parts.append(f"goodput {status.goodput['ratio']:.1%}")
    return Text(", ".join(parts))


def _table(ranks: Sequence[RankStatus], status: RunStatus) -> list[Text]:
    """A line each. Rich's own table measures and wraps each cell: 2 ms for a rank."""
    on_gpu = any(rank.gpu_memory_gib is not None for rank in ranks)
    names = [*_COLUMNS[:-1], *(["GPU"] if on_gpu else []), _COLUMNS[-1]]
    head = [Text(name, style="bold") for name in names]
    rows = [head, *(_row(rank, status, on_gpu=on_gpu) for rank in ranks)]
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    return [_aligned(row, names, widths) for row in rows]


def _aligned(row: Sequence[Text], names: Sequence[str], widths: Sequence[int]) -> Text:
    *cells, last = row
    line = Text(no_wrap=True, overflow="ellipsis")  # the end gives way on a narrow terminal
    for cell, name, width in zip(cells, names, widths, strict=False):
        padding = " " * (width - cell.cell_len)
        for part in (cell, padding) if name in _LEFT else (padding, cell):
            line.append(part)
        line.append("  ")
    return line.append_text(last)


def _row(rank: RankStatus, status: RunStatus, *, on_gpu: bool) -> list[Text]:
    slow = rank.step_ratio is not None and rank.step_ratio > SLOW_RATIO
    return [
        Text(str(rank.rank)),
        Text(rank.host),
        Text(rank.phase, style=_STYLES.get(rank.phase, "")),
        Text("-" if rank.step is None else str(rank.step)),
        Text("-" if rank.step_s is None else short(rank.step_s)),
        Text(
            "-" if rank.step_ratio is None else f"{rank.step_ratio:.2f}",
            style="yellow" if slow else "",
        ),
        _gib(rank.memory_gib),
        *([_gib(rank.gpu_memory_gib)] if on_gpu else []),
        _event(rank.last_event, status.as_of),
    ]


def _most_relevant(ranks: Sequence[RankStatus], rows: int) -> Sequence[RankStatus]:
    """The ``rows`` ranks that one would look at first, in order of rank."""
    rows = max(rows, _LEAST_ROWS)
    if len(ranks) <= rows:
        return ranks
    first = sorted(
        ranks,
        key=lambda rank: (
            rank.phase != "failed",
            -(rank.step_ratio or 0.0),
            -(rank.step_age_s or 0.0),
            rank.rank,
        ),
    )
    return sorted(first[:rows], key=lambda rank: rank.rank)


def _event(event: LastEvent | None, now: float) -> Text:
    if event is None:
        return Text("-")
    said = f": {event.text}" if event.text else ""
    return Text(f"{duration(max(0.0, now - event.ts))} ago {event.event}{said}")


def _gib(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:.1f} GiB")
