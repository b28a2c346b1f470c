"""What was typed, by name, out of the bytes that a terminal sends."""

from __future__ import annotations

ESCAPE = "escape"
_SEQUENCES = {
    b"[A": "up",
    b"OA": "up",
    b"[B": "down",
    b"OB": "down",
    b"[C": "right",
    b"OC": "right",
    b"[D": "left",
    b"OD": "left",
    b"[5~": "page-up",
    b"[6~": "page-down",
    b"[H": "home",
    b"OH": "home",
    b"[1~": "home",
    b"[7~": "home",
    b"[F": "end",
    b"OF": "end",
    b"[4~": "end",
    b"[8~": "end",
}
_SINGLE = {
    0x0D: "enter",
    0x0A: "enter",
    0x7F: "back",
    0x08: "back",
    0x02: "page-up",  # Ctrl-B and Ctrl-F, as in less
    0x06: "page-down",
    0x03: "q",  # Ctrl-C, where a terminal sends it as a byte
    0x0C: "redraw",  # Ctrl-L
    0x20: "page-down",
}
_LONGEST_SEQUENCE = 16


class KeyDecoder:
    """Keys out of bytes, which may come in any pieces.

    A letter or digit is its own name. What is none of our keys is left out, whole.
    """

    def __init__(self) -> None:
        self._pending = b""

    @property
    def is_waiting(self) -> bool:
        """Whether what has come may be the Escape key, or the beginning of another one."""
        return bool(self._pending)

    def feed(self, data: bytes) -> list[str]:
        """The keys that are complete with ``data``."""
        rest, keys = self._pending + data, list[str]()
        self._pending = b""
        while rest:
            if rest[0] != 0x1B:
                keys += _plain_key(rest[0])
                rest = rest[1:]
                continue
            length = _sequence_length(rest)
            if length is None:
                self._pending = rest
                break
            if length == 1:
                keys.append(ESCAPE)
            elif (name := _SEQUENCES.get(rest[1:length])) is not None:
                keys.append(name)
            rest = rest[length:]
        return keys

    def expire(self) -> list[str]:
        """Nothing more has come for a moment: it was the Escape key, if it was only that."""
        pending, self._pending = self._pending, b""
        return [ESCAPE] if pending == b"\x1b" else []


def _plain_key(byte: int) -> list[str]:
    if byte in _SINGLE:
        return [_SINGLE[byte]]
    return [chr(byte)] if 0x20 < byte < 0x7F else []


def _sequence_length(data: bytes) -> int | None:
    """How many bytes the sequence at the beginning of ``data`` has; None while it is not whole.

    1: it is the Escape key, with another key after it.
    """
    if len(data) == 1:
        return None
    if data[1] == ord("O"):
        return 3 if len(data) > 2 else None
    if data[1] != ord("["):
        return 1
    for length, byte in enumerate(data[2:_LONGEST_SEQUENCE], 3):
        if 0x40 <= byte <= 0x7E:
            return length
        if byte < 0x20:
            return length - 1
    return None if len(data) < _LONGEST_SEQUENCE else _LONGEST_SEQUENCE
