"""Launch profiles: schema, lookup, inheritance.

A profile says, for each variable it touches, what it does and why; files are TOML and live
in ``./profiles``, the user's config directory, ``/etc/ncclops/profiles``, or with ncclops itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclops.lazy_names import lazy_names
from ncclops.profiles.model import (
    DEFAULT_RESTART_MODE,
    RESTART_MODES,
    Entry,
    EntryCondition,
    Growth,
    Profile,
    RestartMode,
    Restarts,
    WatchSettings,
)

if TYPE_CHECKING:
    from ncclops.profiles.choose import ProfileSummary, choose_profile, list_profiles, with_lane
    from ncclops.profiles.resolve import load_profiles

__all__ = [
    "DEFAULT_RESTART_MODE",
    "RESTART_MODES",
    "Entry",
    "EntryCondition",
    "Growth",
    "Profile",
    "ProfileSummary",
    "RestartMode",
    "Restarts",
    "WatchSettings",
    "choose_profile",
    "list_profiles",
    "load_profiles",
    "with_lane",
]

# Reading profile files needs pydantic, which takes longer to import than most commands run;
# code that only works with a resolved profile does not pay for it.
__getattr__ = lazy_names(
    __name__,
    {
        "ProfileSummary": "choose",
        "choose_profile": "choose",
        "list_profiles": "choose",
        "with_lane": "choose",
        "load_profiles": "resolve",
    },
)
