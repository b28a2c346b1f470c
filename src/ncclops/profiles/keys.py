"""What the fields of a dataclass say of themselves as keys of a profile, and their limits."""

from __future__ import annotations


def says(text: str, **limits: float) -> dict[str, str | float]:
    """The metadata of a field of which ``ncclops.profiles.schema`` makes a key.

    ``text`` is for docs/profile-keys.md; ``limits`` are pydantic's for numbers: ``ge``, ``gt``,
    ``le``, ``lt``.
    """
    return {"description": text, **limits}
