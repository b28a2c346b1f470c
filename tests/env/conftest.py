"""What tests of the plan share: a profile without files."""

from __future__ import annotations

from collections.abc import Mapping

from ncclops.profiles import Entry, Profile


def make_profile(env: Mapping[str, tuple[Entry, ...]] | None = None) -> Profile:
    """A profile ``p`` that has nothing but these entries."""
    return Profile(
        name="p",
        description="",
        kind="lane",
        nodes="any",
        parameters={},
        timeouts={},
        env=env or {},
        suppress={},
        retry={},
        sources=(),
    )
