"""What a run spent its time on, computed from its events."""

from ncclops.goodput.losses import Losses, losses, restarts_within
from ncclops.goodput.measure import Goodput, describe, measure
from ncclops.goodput.spans import KINDS, Span, SpanKind, SpansSoFar, spans

__all__ = [
    "KINDS",
    "Goodput",
    "Losses",
    "Span",
    "SpanKind",
    "SpansSoFar",
    "describe",
    "losses",
    "measure",
    "restarts_within",
    "spans",
]
