"""A module that code written for NVIDIA's wrapper may import; its contents are documented nowhere.

What it might be needed for is public elsewhere: callbacks in the modules named after them,
finding annotated parameters in ``param_utils``, logging in ``log``.
"""

from __future__ import annotations

__all__: list[str] = []
