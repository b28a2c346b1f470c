"""What a run spent its time on, computed from its events."""

from ncclops.goodput.measure import Goodput, describe, measure
from ncclops.goodput.spans import KINDS, Span, SpanKind, spans

__all__ = ["KINDS", "Goodput", "Span", "SpanKind", "describe", "measure", "spans"]
