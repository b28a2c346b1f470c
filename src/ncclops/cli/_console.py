"""The console of rich, for text that may have come from outside."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ncclops.plain_text import plain


class PlainConsole(Console):
    """Shows no character that a terminal acts on, apart from rich's own sequences, and where the
    character set has no ``…``, with which rich cuts lines, ``~`` in its place."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """See ``Console.render``: what everything printed goes through."""
        is_utf = self.encoding.lower().startswith("utf")
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                text = segment.text if is_utf else segment.text.replace("…", "~")
                yield Segment(plain(text), segment.style)
