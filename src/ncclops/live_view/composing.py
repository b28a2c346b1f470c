"""One frame: what is shown on a terminal of so many columns and rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ncclops.live_view import overview, timeline
from ncclops.live_view.history import Past
from ncclops.live_view.lines import Line, line
from ncclops.live_view.order import Concern, concerns, worst_first
from ncclops.live_view.view import Extent, View, settled
from ncclops.live_view.words import count, duration
from ncclops.status.model import RankStatus, RunStatus

# Rows of the table that are there whatever else there is to say.
_LEAST_RANKS = 3
_COMFORTABLE = 8
# An answer takes a second; after so many the picture is said to be old.
_OLD_S = 6.0

_KEYS = (
    ("j k", "rank"),
    ("l", "log"),
    ("s", "stacks"),
    ("i", "incident"),
    ("t", "timeline"),
    ("?", "help"),
    ("q", "quit"),
)
_PAGE_KEYS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "log": (("q", "back"), ("j k", "scroll"), ("G", "follow"), ("l", "next file"), ("← →", "rank")),
    "stacks": (("q", "back"), ("j k", "scroll"), ("s", "ask again"), ("← →", "rank")),
    "incident": (("q", "back"), ("j k", "scroll"), ("← →", "earlier, later"), ("l", "log")),
    "timeline": (("q", "back"), ("j k", "scroll")),
    "help": (("q", "back"), ("j k", "scroll")),
}
_HELP = (
    ("↑ ↓  j k", "choose a rank; PgUp PgDn Home End g G go further"),
    ("0-9", "choose the rank of that number"),
    ("Esc", "leave the choice to the screen: the rank of most concern"),
    ("l Enter", "its log, as it grows; again: its next file"),
    ("s", "stacks of all ranks of this machine, the chosen one's first; again: ask again"),
    ("i", "the incident that concerns it, else the latest; ← → the others"),
    ("t", "the last hour: what it was spent on, what happened"),
    ("q", "back to the ranks; from there, end. The run goes on"),
    ("", ""),
    ("seen", "how long ago its last step ended, or its last sign of life"),
    ("ratio", "its step time to that of the median rank"),
    ("memory", "of its process; GPU: in use on its GPU, by whomever"),
    ("restarts", "in place, since its process has started"),
    ("", ""),
    ("order", "by number if all fit; else failed, silent and slow ranks first"),
    ("silent", "no step for 10 s and ten times as long as usual: no verdict of a hang"),
)


@dataclass(frozen=True, kw_only=True)
class Content:
    """What was read for a page: ``lines`` for the chosen rank, and the file that it ``follows``."""

    title: str
    lines: Callable[[int | None], Sequence[Line]]
    follows: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All that a frame is made of, besides its size.

    ``silent_s``: for how many seconds the run's status has not come; ``trouble``: why the last look
    at it has failed, if it has.
    """

    status: RunStatus
    past: Past
    view: View
    content: Content | None = None
    silent_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """``lines`` of a terminal, the view as it came out, and what a key can move in."""

    lines: tuple[Line, ...]
    view: View
    extent: Extent


def compose(scene: Scene, columns: int, rows: int) -> Frame:
    """``scene`` on a terminal of ``columns`` and ``rows``: no line is longer, and none too many."""
    columns, rows = max(1, columns), max(1, rows)
    drawn = (
        _ranks(scene, columns, rows) if scene.view.page == "ranks" else _page(scene, columns, rows)
    )
    lines = [each.fit(columns) for each in drawn.lines[:rows]]
    lines += [Line()] * (rows - len(lines))
    return Frame(lines=tuple(lines), view=drawn.view, extent=drawn.extent)


# --- the ranks --------------------------------------------------------------------------------


def _ranks(scene: Scene, columns: int, rows: int) -> Frame:
    status, seen = scene.status, concerns(scene.status)
    sorted_ = worst_first(status, seen)
    about = _about(scene, seen, columns)
    room = rows - 2  # the head of the table, the keys
    most = max(1, room - min(len(sorted_), max(_LEAST_RANKS, min(_COMFORTABLE, room - 6))))
    about = _within(about, most)
    shown = max(1, room - len(about))
    by_number = len(sorted_) <= shown
    order: Sequence[RankStatus] = status.ranks if by_number else sorted_
    extent = Extent(
        ranks=[rank.rank for rank in order],
        worst=sorted_[0].rank if sorted_ else None,
        lines=0,
        shown=shown,
    )
    view = settled(scene.view, extent)
    visible = order[view.top : view.top + shown]
    chosen = extent.worst if view.rank is None else view.rank
    lines = list(about)
    if visible:
        lines += overview.table(visible, status, seen, columns=columns, chosen=chosen)
    else:
        lines.append(line("no rank has started yet", "dim"))
    lines += _newest(scene.past, columns, rows - 1 - len(lines))
    where = "" if by_number else _where(view.top, len(visible), len(order), "ranks, worst first")
    if view.typed:
        where = f"rank {view.typed}_"
    return Frame(lines=(*lines, _foot(_KEYS, where, columns)), view=view, extent=extent)


def _newest(past: Past, columns: int, room: int) -> list[Line]:
    """What has happened last, in the rows that the ranks leave."""
    shown = [Line(), *timeline.newest(past, columns, room - 1)]
    return [*shown, *[Line()] * (room - len(shown))] if len(shown) > 1 else [Line()] * room


def _about(scene: Scene, seen: Mapping[int, Concern], columns: int) -> list[Line]:
    """The lines about the run, the most important first."""
    first, *rest = overview.about_run(scene.status, seen, columns)
    facts = rest.pop()
    about = [first]
    if scene.silent_s > _OLD_S:
        old = f"no answer for {duration(scene.silent_s)}: this is what was known then"
        about.append(line(old, "yellow"))
    if scene.trouble:
        about.append(line(f"the run cannot be looked at: {scene.trouble}", "yellow"))
    drawn = timeline.bar(scene.past, columns)
    return [*about, *rest, facts, *([drawn] if drawn.parts else [])]


def _within(about: Sequence[Line], most: int) -> list[Line]:
    """The first lines, and where some are left out how many."""
    if len(about) <= most:
        return list(about)
    if most < 3:
        return list(about[:most])
    left = len(about) - most + 1
    # The last two, what the run is and its last hour, are the first to go, and not counted.
    kept, hidden = list(about[: most - 1]), left - 2
    return [
        *kept,
        line(f"and {count(hidden, 'more line')}", "dim") if hidden > 0 else about[most - 1],
    ]


# --- the pages --------------------------------------------------------------------------------


def _page(scene: Scene, columns: int, rows: int) -> Frame:
    view = scene.view
    title, body = _body(scene, columns)
    shown = max(1, rows - 2)  # the title, the keys
    sorted_ = worst_first(scene.status, concerns(scene.status))
    extent = Extent(
        ranks=[rank.rank for rank in scene.status.ranks],
        worst=sorted_[0].rank if sorted_ else None,
        lines=len(body),
        shown=shown,
    )
    view = settled(view, extent)
    visible = list(body[view.top : view.top + shown])
    visible += [Line()] * (shown - len(visible))
    where = _where(view.top, min(shown, len(body)), len(body), "lines")
    keys = _PAGE_KEYS.get(view.page, ())
    head = line(f" {title} ").pad(columns).styled("reverse")
    return Frame(lines=(head, *visible, _foot(keys, where, columns)), view=view, extent=extent)


def _body(scene: Scene, columns: int) -> tuple[str, Sequence[Line]]:
    match scene.view.page:
        case "timeline":
            return "the last hour", timeline.page(scene.past, columns)
        case "help":
            return "keys and columns", _help(columns)
        case _ if scene.content is None:
            return f"{scene.view.page}: reading", [line("…", "dim")]
    return scene.content.title, _wrapped(scene.content.lines(scene.view.rank), columns)


def _wrapped(lines: Sequence[Line], columns: int) -> list[Line]:
    return [row for each in lines for row in each.wrapped(columns, indent=_indent(each, columns))]


def _indent(whole: Line, columns: int) -> int:
    """Of the rows below the first: as the text beside a name, or a little more than the line's."""
    first, style = whole.parts[0] if whole.parts else ("", "")
    if style == "dim" and len(whole.parts) > 1:
        return min(len(first), columns // 3)
    return min(len(first) - len(first.lstrip(" ")) + 2, columns // 3)


def _help(columns: int) -> list[Line]:
    width = 10
    return [
        row
        for key, text in _HELP
        for row in line(f"{key:<{width}}", "bold").add(text).wrapped(columns, indent=width)
    ]


def _where(top: int, shown: int, total: int, what: str) -> str:
    if shown >= total:
        return ""
    return f"{top + 1}-{top + shown} of {total} {what}"


def _foot(keys: Sequence[tuple[str, str]], where: str, columns: int) -> Line:
    """The keys as far as there is room, and at the right end where one is."""
    room = columns - (len(where) + 2 if where else 0)
    shown, last = Line(), keys[-1] if keys else None
    for key, name in keys:
        gap = "  " if shown.parts else ""
        # The way out is shown before what is in between.
        kept = 0 if (key, name) == last else len("".join(last or ())) + 3
        if shown.columns + len(gap) + len(key) + 1 + len(name) + kept > room:
            continue
        shown = shown.add(gap).add(key, "bold").add(f" {name}", "dim")
    if where:
        shown = shown.pad(columns - min(columns, len(where))).add(where, "dim")
    return shown
