"""Failure classification: what failed, which line proves it, may it be retried.

``classify_paths`` reads logs from files and directories, ``Scanner`` takes live output;
both end in a ``Report``. The retry decision is ``ncclops.classify.policy``.
"""

from ncclops.classify.inputs import classify_bytes, classify_paths
from ncclops.classify.loader import SignatureSet, load_signatures
from ncclops.classify.model import Evidence, Report, Signature, Verdict
from ncclops.classify.scanner import Scanner

__all__ = [
    "Evidence",
    "Report",
    "Scanner",
    "Signature",
    "SignatureSet",
    "Verdict",
    "classify_bytes",
    "classify_paths",
    "load_signatures",
]
