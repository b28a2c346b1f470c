"""The console of rich, for text that may have come from outside."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ncclops.plain_text import plain


class PlainConsole(Console):
    """Shows no character that a terminal acts on, apart from rich's own sequences."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """See ``Console.render``: what everything printed goes through."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)
