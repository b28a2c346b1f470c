"""The shipped signatures, read once for all test modules: without a cache it takes a second."""

from __future__ import annotations

from ncclops.classify import load_signatures

LOADED = load_signatures()
