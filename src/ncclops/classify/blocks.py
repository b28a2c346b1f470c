"""From a stream of bytes in any cut to blocks of whole lines, in constant memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Colours and cursor moves (CSI), titles (OSC), and the two-byte escapes.
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|[@-Z\\^_])")
# What may wait for its line end. A longer line is cut, with an overlap in which any message
# that straddles the cut is seen whole.
_LONGEST_WAIT = 1 << 20
_OVERLAP = 4096


class BlockCutter:
    """Cuts what is pushed at line ends and keeps count of lines.

    A block comes with the 1-based number of its first line. Escape sequences are gone from it,
    as is nothing else: invalid UTF-8, carriage returns and NULs pass through.
    """

    def __init__(self) -> None:
        self._waiting = b""
        self.line = 1

    def push(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """The blocks that ``data`` completes."""
        end = data.rfind(b"\n") + 1
        if end:
            yield self._number(self._waiting + data[:end])
            self._waiting = data[end:]
        else:
            self._waiting += data
        if len(self._waiting) > _LONGEST_WAIT:
            yield from self._cut_long_line()

    def pending(self) -> tuple[bytes, int]:
        """The line that has no end yet, as a block; it stays pending."""
        return _plain(self._waiting), self.line

    def _cut_long_line(self) -> Iterator[tuple[bytes, int]]:
        # A progress bar may rewrite its line for days: its last state is the last segment.
        cut = self._waiting.rfind(b"\r") + 1 or len(self._waiting) - _OVERLAP
        block, self._waiting = self._waiting[: cut + _OVERLAP], self._waiting[cut:]
        yield _plain(block), self.line

    def _number(self, block: bytes) -> tuple[bytes, int]:
        first = self.line
        self.line += block.count(b"\n")
        return _plain(block), first


def _plain(block: bytes) -> bytes:
    return _ANSI.sub(b"", block) if b"\x1b" in block else block
