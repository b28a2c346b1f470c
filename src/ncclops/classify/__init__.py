"""Failure classification: what failed, which line proves it, whether it may be retried.

    from ncclops.classify import classify

    report = classify("runs/20260101-120000-abcdef")
    print(report.verdict.class_, report.verdict.rank, report.verdict.eligible)

``classify`` reads a path or lines, ``classify_paths`` several paths as one job, ``Scanner`` takes
live output; all end in a ``Report``. The retry decision is ``ncclops.classify.policy``.
"""

from ncclops.classify.inputs import classify, classify_bytes, classify_paths
from ncclops.classify.loader import SignatureSet, load_signatures
from ncclops.classify.model import Classification, Evidence, Report, Signature
from ncclops.classify.scanner import Scanner

Verdict = Classification  # its name until 0.1: `launch` has a verdict of its own

__all__ = [
    "Classification",
    "Evidence",
    "Report",
    "Scanner",
    "Signature",
    "SignatureSet",
    "Verdict",
    "classify",
    "classify_bytes",
    "classify_paths",
    "load_signatures",
]
