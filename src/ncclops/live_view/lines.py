"""Text of one line, in parts with a style each: fit for a terminal, cut to its width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, set_cell_size

from ncclops.plain_text import plain

Style = Literal["", "bold", "dim", "red", "yellow", "green", "cyan", "magenta", "reverse"]

# What is longer is not read on a terminal. Also the bound for what takes no room, such as accents
# over accents.
_MOST_CHARS = 2000
_SEQUENCES: dict[Style, str] = {
    "bold": "1",
    "dim": "2",
    "reverse": "7",
    "red": "1;31",
    "yellow": "33",
    "green": "32",
    "cyan": "36",
    "magenta": "35",
}
# Of these the text shows the same without colour.
_COLOURS = ("red", "yellow", "green", "cyan", "magenta")
# For a terminal whose character set has no others.
_ASCII = str.maketrans("…█▓▒░·─│×←→↑↓", "~#=+-.-|x<>^v")


@dataclass(frozen=True)
class Line:
    """Parts of text and their styles. Made by :func:`line`, and so without characters that act."""

    parts: tuple[tuple[str, Style], ...] = ()

    def add(self, text: str, style: Style = "") -> Line:
        """The same with ``text``, which may be from anywhere, at its end."""
        return Line((*self.parts, (_clean(text), style)))

    def __add__(self, other: Line) -> Line:
        return Line(self.parts + other.parts)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)

    @property
    def columns(self) -> int:
        """How many columns it takes."""
        return sum(cell_len(text) for text, _ in self.parts)

    def fit(self, columns: int) -> Line:
        """The same in ``columns`` at most, with ``…`` where it is cut."""
        if self.columns <= columns:
            return self
        if columns <= 0:
            return Line()
        kept: list[tuple[str, Style]] = []
        left = columns - 1  # the last one is for `…`
        for text, style in self.parts:
            room = min(left, cell_len(text))
            kept.append((set_cell_size(text, room), style))
            left -= room
            if cell_len(text) > room:
                break
        return Line((*kept, ("…", "dim")))

    def pad(self, columns: int) -> Line:
        """The same in exactly ``columns``."""
        cut = self.fit(columns)
        return (
            cut
            if cut.columns == columns
            else Line((*cut.parts, (" " * (columns - cut.columns), "")))
        )

    def styled(self, style: Style) -> Line:
        """The same, all of it in ``style``."""
        return Line(tuple((text, style) for text, _ in self.parts))

    def wrapped(self, columns: int, *, indent: int = 0) -> list[Line]:
        """The same over as many lines of ``columns`` as it takes, later ones moved in."""
        if self.columns <= columns or columns <= indent + 1:
            return [self]
        rows: list[Line] = []
        row, room = Line(), columns
        for text, style in self.parts:
            rest = text
            while rest:
                piece, rest = _split(rest, room)
                row = Line((*row.parts, (piece, style)))
                room -= cell_len(piece)
                if rest:
                    rows.append(row)
                    row, room = Line(((" " * indent, ""),)), columns - indent
        return [*rows, row]


def line(text: str = "", style: Style = "") -> Line:
    """``text``, which may be from anywhere, as a line."""
    return Line(((_clean(text), style),)) if text else Line()


def encode(shown: Line, *, colour: bool, encoding: str) -> bytes:
    """``shown`` as a terminal of the character set ``encoding`` takes it.

    Without ``colour`` what is bold, dim or reverse stays so.
    """
    pieces = []
    for text, style in shown.parts:
        if not text:
            continue
        sequence = _SEQUENCES.get(style, "")
        if not colour and style in _COLOURS:
            sequence = "1" if style == "red" else ""
        pieces.append(f"\x1b[{sequence}m{text}\x1b[m" if sequence else text)
    whole = "".join(pieces)
    try:
        return whole.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return whole.translate(_ASCII).encode("ascii", errors="replace")


def _split(text: str, columns: int) -> tuple[str, str]:
    """``text`` in two, the first in ``columns`` at most: after a space or a `/` if one is near."""
    if cell_len(text) <= columns:
        return text, ""
    cut, taken = 0, 0
    while cut < len(text) and (taken := taken + cell_len(text[cut])) <= columns:
        cut += 1
    near = max(text.rfind(" ", 0, cut), text.rfind("/", 0, cut))
    if near > cut // 2:
        cut = near + 1
    cut = max(cut, 1)
    return text[:cut], text[cut:]


def _clean(text: str) -> str:
    if text.isascii() and text.isprintable() and len(text) <= _MOST_CHARS:
        return text
    kept = text[: _MOST_CHARS + 1].replace("\n", " ").expandtabs(4)
    shown = plain(kept)  # a character that acts becomes several
    return shown if len(shown) <= _MOST_CHARS else shown[: _MOST_CHARS - 1] + "…"
