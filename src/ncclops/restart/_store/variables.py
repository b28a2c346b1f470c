"""What variables of the environment say of the store: read, and checked before any process starts.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

STORE = "NCCLOPS_STORE"
RELAY = "NCCLOPS_STORE_RELAY"


def external_store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Host and port of a store that no rank serves, from ``host:port`` (``[v6]:port``).

    Raises ``ValueError``.
    """
    text = environ.get(STORE)
    if not text:
        return None
    host, _, port = text.rpartition(":")
    # The length first: Python refuses to read thousands of digits.
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if not host or not 0 < number < 65536:
        raise ValueError(f"{STORE}={text[:80]!r}: expected host:port, such as node0:29400")
    return host.strip("[]"), number


def relay_is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the ranks of this host are to share a relay; the same for all of them.

    As ``NCCLOPS_STORE_RELAY`` says, or else where there are several, in a job of several hosts: the
    ranks of a single host have no network before the store. Raises ``ValueError``.
    """
    chosen = environ.get(RELAY, "")
    if chosen not in ("", "0", "1"):
        raise ValueError(
            f"{RELAY}={chosen!r}: 1 (the ranks of a host share a connection to the "
            "store), 0 (they do not), or unset (where it pays)"
        )
    if chosen:
        return chosen == "1"
    here, everywhere = (environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return here.isdecimal() and everywhere.isdecimal() and 1 < int(here) < int(everywhere)
