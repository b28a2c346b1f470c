"""Old name of the module for the ring of monitor processes."""

from __future__ import annotations

from ncclops.restart._monitor.ring import Address, Ring, RingActions

__all__ = ["Address", "Ring", "RingActions"]
