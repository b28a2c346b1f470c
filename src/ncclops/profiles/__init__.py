"""Launch profiles: schema, lookup, inheritance.

A profile says, for each variable it touches, what it does and why; files are TOML and live
in ``./profiles``, the user's config directory, or with ncclops itself.
"""

from __future__ import annotations

from ncclops.profiles.choose import ProfileSummary, choose_profile, list_profiles, with_lane
from ncclops.profiles.model import (
    DEFAULT_RESTART_MODE,
    RESTART_MODES,
    Condition,
    Entry,
    Profile,
    RestartMode,
    Timeouts,
)
from ncclops.profiles.resolve import load_profiles

__all__ = [
    "DEFAULT_RESTART_MODE",
    "RESTART_MODES",
    "Condition",
    "Entry",
    "Profile",
    "ProfileSummary",
    "RestartMode",
    "Timeouts",
    "choose_profile",
    "list_profiles",
    "load_profiles",
    "with_lane",
]
