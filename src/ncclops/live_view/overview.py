"""The run in a few lines, and the table of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from ncclops.live_view.lines import Line, Style, line
from ncclops.live_view.order import Concern
from ncclops.live_view.words import age, count, duration, short
from ncclops.rank_lists import rank_list
from ncclops.status.compare import SLOW_RATIO
from ncclops.status.model import RankStatus, RunStatus

PHASES: Mapping[str, Style] = {
    "training": "green",
    "failed": "red",
    "lost": "red",
    "restarting": "yellow",
    "retrying": "yellow",
    "stopping": "yellow",
    "ended": "dim",
}
_NAMED = 4  # ranks that a line about several names
_GAP = 2
_LEAST_EVENT = 14  # columns below which the last event says nothing


def about_run(status: RunStatus, seen: Mapping[int, Concern], columns: int) -> list[Line]:
    """What there is to say of the run, the most important first, a line each."""
    shown = [_headline(status, columns)]
    if status.reason:
        reason = status.reason.removeprefix(f"{status.outcome}: ")
        shown += line(reason, "red" if status.exit_code else "").wrapped(columns, indent=2)[:3]
    shown += [line(note, "yellow") for note in status.notes]
    shown += _concerns(status, seen)
    if status.last_fault is not None:
        fault = status.last_fault
        where = "" if fault.rank is None else f", rank {fault.rank}"
        total = sum(status.faults.values())
        of = f" ({total} in all)" if total > 1 else ""
        ago = duration(max(0.0, status.as_of - fault.ts))
        cause = " ".join(fault.cause[:500].split())
        shown.append(line(f"last fault {ago} ago{where}{of}: {fault.kind}: {cause}"))
    shown.append(_facts(status))
    return shown


def _headline(status: RunStatus, columns: int) -> Line:
    word = status.outcome or status.phase
    failed = status.phase == "ended" and status.exit_code != 0
    shown = line(word, "red" if failed else PHASES.get(status.phase, "bold"))
    parts = [] if status.exit_code is None else [f"exit code {status.exit_code}"]
    if status.step is not None:
        parts.append(f"step {status.step}")
    if status.median_step_s is not None and status.phase not in ("ended", "lost"):
        parts.append(f"{short(status.median_step_s)} a step")
    if status.seconds is not None:
        parts.append(duration(status.seconds))
    if status.goodput is not None and isinstance(ratio := status.goodput.get("ratio"), float | int):
        parts.append(f"goodput {ratio:.1%}")
    # The last ones give way.
    while parts and len(word) + len(" · ".join(["", *parts])) > columns:
        parts.pop()
    return shown.add(" · ".join(["", *parts]))


def _facts(status: RunStatus) -> Line:
    parts = [status.run_id]
    if status.world_size is not None:
        on = f" on {status.nodes[0]}" if len(status.nodes) == 1 else ""
        nodes = f" on {len(status.nodes)} nodes" if len(status.nodes) > 1 else on
        parts.append(f"{count(status.world_size, 'rank')}{nodes}")
    parts.append(f"{count(status.restarts, 'restart')} in place")
    if status.attempt:
        parts.append(f"{status.attempt} with new processes")
    if status.profile:
        parts.append(status.profile)
    return line(" · ".join(parts), "dim")


def _concerns(status: RunStatus, seen: Mapping[int, Concern]) -> list[Line]:
    by_concern: dict[Concern, list[RankStatus]] = {}
    for rank in status.ranks:
        by_concern.setdefault(seen[rank.rank], []).append(rank)
    shown = []
    if failed := by_concern.get(Concern.FAILED):
        shown.append(line(f"failed: {rank_list([each.rank for each in failed])}", "red"))
    if silent := by_concern.get(Concern.SILENT):
        silent.sort(key=lambda each: (-1 if each.step is None else each.step, each.rank))
        named = [
            f"rank {each.rank} for {age(each.step_age_s or 0.0)}"
            + ("" if each.step is None else f" (at {each.step})")
            for each in silent
        ]
        shown.append(line(f"no step: {_some(named)}", "yellow"))
    if status.stragglers:
        slow = [
            f"rank {each.rank} {each.ratio - 1:+.0%}" + (f" ({each.kind})" if each.kind else "")
            for each in status.stragglers
        ]
        shown.append(line(f"slow: {_some(slow)}", "yellow"))
    return shown


def _some(named: Sequence[str]) -> str:
    more = f", and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more


# --- the table --------------------------------------------------------------------------------

Cell = tuple[str, Style]


@dataclass(frozen=True)
class _Column:
    """``weight``: the higher, the sooner it gives way. ``least``: so that it does not change its
    width with each value."""

    header: str
    weight: int
    cell: Callable[[RankStatus], Cell]
    least: int = 0
    left: bool = False


def table(
    ranks: Sequence[RankStatus],
    status: RunStatus,
    seen: Mapping[int, Concern],
    *,
    columns: int,
    chosen: int | None,
) -> list[Line]:
    """A head, and a line for each of ``ranks``, in ``columns``."""
    shown = _fitting(_columns(status, seen), ranks, columns)
    head = line("  ")
    for column, width in shown:
        head = head.add(_aligned(column.header, width, column) + " " * _GAP, "bold")
    room = columns - head.columns
    with_event = room >= _LEAST_EVENT
    rows = [head.add("last event", "bold") if with_event else head]
    for rank in ranks:
        is_chosen = rank.rank == chosen
        row = line("> " if is_chosen else "  ")
        for column, width in shown:
            text, style = column.cell(rank)
            row = row.add(_aligned(text, width, column) + " " * _GAP, style)
        if with_event:
            row = row.add(_event(rank, status.as_of), "dim")
        rows.append(row.pad(columns).styled("reverse") if is_chosen else row)
    return [row.fit(columns) for row in rows]


def _columns(status: RunStatus, seen: Mapping[int, Concern]) -> list[_Column]:
    found = [_Column("rank", 0, lambda rank: (str(rank.rank), ""))]
    if len(status.nodes) != 1:
        found.append(_Column("host", 4, lambda rank: (_cut(rank.host, 20), ""), left=True))
    found += [
        _Column("phase", 1, _phase, least=10, left=True),
        _Column("step", 2, lambda rank: (_or_dash(rank.step), ""), least=6),
        _Column("step time", 3, lambda rank: (_or_dash(rank.step_s, short), "")),
        _Column("ratio", 6, _ratio),
        _Column("seen", 5, lambda rank: _age(rank, seen[rank.rank]), least=4),
        _Column("memory", 8, lambda rank: (_or_dash(rank.memory_gib, _gib), "")),
    ]
    if any(rank.gpu_memory_gib is not None for rank in status.ranks):
        found.append(_Column("GPU", 7, lambda rank: (_or_dash(rank.gpu_memory_gib, _gib), "")))
    return [*found, _Column("restarts", 9, lambda rank: (str(rank.iteration or "-"), ""))]


def _fitting(
    columns: Sequence[_Column], ranks: Sequence[RankStatus], room: int
) -> list[tuple[_Column, int]]:
    """The columns that have room, and their widths; at least the rank's."""
    widths = {
        column.header: max(
            [len(column.header), column.least, *(cell_len(column.cell(rank)[0]) for rank in ranks)]
        )
        for column in columns
    }
    kept: set[str] = set()
    left = room - _GAP
    for column in sorted(columns, key=lambda each: each.weight):
        if widths[column.header] <= left or not kept:
            kept.add(column.header)
            left -= widths[column.header] + _GAP
    return [(each, widths[each.header]) for each in columns if each.header in kept]


def _aligned(text: str, width: int, column: _Column) -> str:
    gap = " " * max(0, width - cell_len(text))
    return text + gap if column.left else gap + text


def _phase(rank: RankStatus) -> Cell:
    return _cut(rank.phase, 14), PHASES.get(rank.phase, "")


def _ratio(rank: RankStatus) -> Cell:
    if rank.step_ratio is None:
        return "-", ""
    text = f"{rank.step_ratio:.2f}" if rank.step_ratio < 100 else ">99"
    return text, "yellow" if rank.step_ratio > SLOW_RATIO else ""


def _age(rank: RankStatus, concern: Concern) -> Cell:
    """How long ago its last step ended, or its last sign of life where there is no step."""
    ago = rank.step_age_s if rank.step_age_s is not None else rank.heartbeat_age_s
    return _or_dash(ago, age), "yellow" if concern is Concern.SILENT else ""


def _event(rank: RankStatus, now: float) -> str:
    last = rank.last_event
    if last is None:
        return "-"
    said = f": {last.text}" if last.text else ""
    return f"{age(max(0.0, now - last.ts))} ago {last.event}{said}"


def _cut(text: str, columns: int) -> str:
    return line(" ".join(text[:200].split())).fit(columns).text


def _gib(value: float) -> str:
    return f"{value:.1f}G" if value < 1000 else f"{value:.0f}G"


def _or_dash(value: float | None, spelled: Callable[[float], str] = str) -> str:
    return "-" if value is None else spelled(value)
