"""What keys do: which page, which rank, how far."""

from __future__ import annotations

from ncclops.live_view.keys import KeyDecoder
from ncclops.live_view.view import Extent, Request, View, pressed

RANKS = Extent(ranks=[7, 5, 3, 0, 1, 2, 4, 6], worst=7, lines=0, shown=4)


def typed(view: View, *keys: str, extent: Extent = RANKS) -> View:
    for key in keys:
        view = pressed(view, key, extent)
    return view


def test_the_worst_rank_is_chosen_until_somebody_chooses() -> None:
    assert View().rank is None
    assert typed(View(), "l").rank == 7
    assert typed(View(), "j").rank == 5
    assert typed(View(), "down", "down", "k").rank == 5
    assert typed(View(), "j", "escape").rank is None


def test_the_chosen_rank_stays_in_sight() -> None:
    view = typed(View(), "j", "j", "j", "j", "j")
    assert (view.rank, view.top) == (2, 2)
    assert typed(view, "home").top == 0
    assert (typed(view, "end").rank, typed(view, "end").top) == (6, 4)
    assert typed(View(), "page-down").rank == 0
    assert typed(View(), "k").rank == 7


def test_a_number_chooses_its_rank() -> None:
    view = typed(View(), "4")
    assert (view.rank, view.typed, view.top) == (4, "4", 3)
    assert typed(view, "2").rank == 4  # there is no 42
    assert typed(view, "enter") == typed(view, "escape")
    assert typed(view, "enter").page == "ranks"
    assert typed(view, "l").page == "log"


def test_pages_and_the_way_back() -> None:
    log = typed(View(), "j", "l")
    assert log.request == Request(page="log", rank=5, which=0, times=1)
    assert log.at_end
    again = typed(log, "l").request
    assert again is not None
    assert again.which == 1
    assert typed(log, "q") == typed(log, "escape")
    back = typed(log, "q")
    assert (back.page, back.rank, back.request, back.over) == ("ranks", 5, None, False)
    assert typed(back, "q").over
    for key, page in zip("sit?", ("stacks", "incident", "timeline", "help"), strict=True):
        assert typed(log, key).page == page
    assert typed(View(), "?", "?").page == "ranks"


def test_stacks_are_asked_for_once_for_all_ranks() -> None:
    view = typed(View(), "s")
    assert view.request == Request(page="stacks", rank=None, which=0, times=1)
    assert typed(view, "right").request == view.request
    assert typed(view, "s").request != view.request


def test_incidents_beside_the_first() -> None:
    view = typed(View(), "i", "left", "left", "right")
    assert view.request == Request(page="incident", rank=7, which=-1, times=1)


def test_a_log_is_followed_until_somebody_scrolls() -> None:
    long = Extent(ranks=[0, 1], worst=0, lines=100, shown=20)
    view = typed(View(), "l", extent=long)
    assert (view.top, view.at_end) == (80, True)
    up = typed(view, "k", extent=long)
    assert (up.top, up.at_end) == (79, False)
    assert typed(up, "j", extent=long).at_end
    assert typed(up, "home", extent=long).top == 0
    assert typed(up, "G", extent=long) == view
    assert typed(up, "right", extent=long).rank == 1


def test_unknown_keys_do_nothing() -> None:
    for view in (View(), typed(View(), "l")):
        assert typed(view, "x", "~", "Z") == view
    nobody = Extent(ranks=[], worst=None, lines=0, shown=4)
    assert typed(View(), "j", "1", "end", extent=nobody).rank is None


def test_keys_come_in_any_pieces() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"jk\x1b[A\x1bOB\x1b[5~") == ["j", "k", "up", "down", "page-up"]
    assert decoder.feed(b"\x1b") == []
    assert decoder.is_waiting
    assert decoder.feed(b"[") == []
    assert decoder.feed(b"Bq") == ["down", "q"]
    assert decoder.feed(b"\x1b") == []
    assert decoder.expire() == ["escape"]
    assert decoder.feed(b"\x1bq") == ["escape", "q"]
    assert decoder.expire() == []


def test_what_is_no_key_is_left_out_whole() -> None:
    decoder = KeyDecoder()
    assert decoder.feed("é漢".encode()) == []
    assert decoder.feed(b"\x1b[1;5C\x1b[<0;1;1M\x1b[200~") == []
    assert decoder.feed(b"\x1b[" + b"9" * 100) == ["9"] * 86
    assert decoder.feed(b"\r\x7f\x0c ") == ["enter", "back", "redraw", "page-down"]
