"""Text from outside in HTML."""

from __future__ import annotations

import html

from ncclops.plain_text import plain


def escape(text: str) -> str:
    """``text`` as HTML shows it, in an element or in an attribute's quotation marks."""
    return html.escape(plain(text))
