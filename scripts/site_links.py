"""A hook of the documentation site: links out of docs/, which GitHub shows, become plain text."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page without the links that the site has no target for."""
    return _OUTSIDE.sub(r"\1", markdown)
