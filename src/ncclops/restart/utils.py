"""A name that code written for the other wrapper may import; nothing in it is documented there.

What it might be needed for is public elsewhere: callbacks in the modules named after them,
finding annotated parameters in ``param_utils``, logging in ``log``.
"""

from __future__ import annotations

__all__: list[str] = []
