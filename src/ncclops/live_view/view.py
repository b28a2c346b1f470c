"""Which page is shown, and what a key changes in that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ncclops.live_view.keys import ESCAPE

Page = Literal["ranks", "log", "stacks", "incident", "timeline", "help"]

_PAGE_KEYS: dict[str, Page] = {
    "l": "log",
    "s": "stacks",
    "i": "incident",
    "t": "timeline",
    "?": "help",
    "h": "help",
}
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1}
_MOST_DIGITS = 7


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a page needs to be read. ``which`` is the number of the log file or the incident; it is
    counted on, and back, from the first one that is shown. ``times``: how often it was asked for.
    """

    page: Page
    rank: int | None
    which: int
    times: int


@dataclass(frozen=True, kw_only=True)
class View:
    """What is looked at.

    ``rank`` is the chosen one; None: whichever is of most concern. ``top`` is the first row of the
    table, or line of a page, that is shown; ``at_end``: the end of a page, as it grows. ``typed``
    are the digits of a rank.
    """

    page: Page = "ranks"
    rank: int | None = None
    top: int = 0
    at_end: bool = False
    which: int = 0
    times: int = 0
    typed: str = ""
    table_top: int = 0
    over: bool = False

    @property
    def request(self) -> Request | None:
        """What has to be read for it; None where the status is all."""
        if self.page not in ("log", "stacks", "incident"):
            return None
        # One look at the stacks has those of all ranks.
        rank = None if self.page == "stacks" else self.rank
        return Request(page=self.page, rank=rank, which=self.which, times=self.times)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What there is to move in: the ranks in the order of the table, the one of most concern, the
    lines of the page, and how many rows or lines are shown at a time."""

    ranks: Sequence[int]
    worst: int | None
    lines: int
    shown: int

    def row(self, rank: int | None) -> int:
        """Where ``rank`` is in the table."""
        wanted = self.worst if rank is None else rank
        return self.ranks.index(wanted) if wanted in self.ranks else 0


def pressed(view: View, key: str, extent: Extent) -> View:
    """``view`` after ``key``."""
    if view.typed and not key.isdecimal():
        view = replace(view, typed="")
        if key in ("enter", ESCAPE, "back"):
            return view
    if key in _PAGE_KEYS:
        return settled(_turned(view, _PAGE_KEYS[key], extent), extent)
    if key == "q" or (key in (ESCAPE, "back") and view.page != "ranks"):
        if view.page == "ranks":
            return replace(view, over=True)
        return replace(view, page="ranks", top=view.table_top, at_end=False)
    if view.page == "ranks":
        return settled(_in_table(view, key, extent), extent)
    return settled(_in_page(view, key, extent), extent)


def settled(view: View, extent: Extent) -> View:
    """``view`` with nothing beyond the end, and the chosen rank in sight: after any change."""
    if view.page != "ranks":
        if view.rank is None:
            view = replace(view, rank=extent.worst)
        last = max(0, extent.lines - extent.shown)
        top = last if view.at_end else min(view.top, last)
        return replace(view, top=top)
    row = extent.row(view.rank)
    top = min(view.top, max(0, len(extent.ranks) - extent.shown))
    top = min(max(top, row - extent.shown + 1), row)
    return replace(view, top=max(0, top))


def _turned(view: View, page: Page, extent: Extent) -> View:
    """Another page, or the next of its kind where it is shown already."""
    if view.page == page:
        if page == "log":
            return replace(view, which=view.which + 1, at_end=True)
        if page == "stacks":
            return replace(view, times=view.times + 1, top=0)
        return replace(view, page="ranks", top=view.table_top, at_end=False)
    table_top = view.top if view.page == "ranks" else view.table_top
    return replace(
        view,
        page=page,
        rank=extent.worst if view.rank is None else view.rank,
        top=0,
        which=0,
        times=view.times + 1,
        at_end=page == "log",
        table_top=table_top,
    )


def _in_table(view: View, key: str, extent: Extent) -> View:
    ranks = extent.ranks
    if key.isdecimal():
        typed = (view.typed + key)[-_MOST_DIGITS:]
        return replace(view, typed=typed, rank=_named(typed, ranks, view.rank))
    if key in (ESCAPE, "back"):
        return replace(view, rank=None)
    if not ranks:
        return view
    row = extent.row(view.rank)
    page = max(1, extent.shown - 1)
    moves = {"page-up": -page, "page-down": page, "home": -row, "end": len(ranks), **_MOVES}
    moves |= {"g": -row, "G": len(ranks)}
    if key == "enter":
        return _turned(view, "log", extent)
    if key not in moves:
        return view
    return replace(view, rank=ranks[min(max(row + moves[key], 0), len(ranks) - 1)])


def _named(typed: str, ranks: Sequence[int], otherwise: int | None) -> int | None:
    """The rank of that number, or where there is none the chosen one."""
    return int(typed) if int(typed) in ranks else otherwise


def _in_page(view: View, key: str, extent: Extent) -> View:
    if key in ("left", "right"):
        return _beside(view, 1 if key == "right" else -1, extent)
    last = max(0, extent.lines - extent.shown)
    page = max(1, extent.shown - 1)
    moves = {"page-up": -page, "page-down": page, **_MOVES}
    if key in ("home", "g"):
        return replace(view, top=0, at_end=False)
    if key in ("end", "G"):
        return replace(view, top=last, at_end=view.page == "log")
    if key not in moves:
        return view
    top = min(max(view.top + moves[key], 0), last)
    return replace(view, top=top, at_end=view.page == "log" and top >= last)


def _beside(view: View, by: int, extent: Extent) -> View:
    """The page of the next rank; of incidents, the next incident."""
    if view.page == "incident":
        return replace(view, which=view.which + by, top=0)
    if view.page not in ("log", "stacks") or not extent.ranks:
        return view
    row = extent.row(view.rank)
    rank = extent.ranks[min(max(row + by, 0), len(extent.ranks) - 1)]
    if view.page == "stacks":  # those that were read have all ranks
        return replace(view, rank=rank, top=0)
    return replace(view, rank=rank, top=0, which=0, at_end=True)
