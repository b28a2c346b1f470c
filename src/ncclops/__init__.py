"""ncclops: start a distributed PyTorch job with an environment it can explain.

Importing this package imports nothing heavy: ``ncclops.restart`` loads torch only when it
is first touched.
"""

from __future__ import annotations

from ncclops._version import __version__

__all__ = ["__version__"]
