"""Has libnccl open its bootstrap listener here: with NCCL_DEBUG=INFO it says where.

``python -m tests.preflight.nccl_listener LIBRARY``, with NCCL's variables as usual. Needs no GPU.
"""

from __future__ import annotations

import ctypes
import sys

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES, nccl.h


class UniqueId(ctypes.Structure):
    """What ``ncclGetUniqueId`` fills."""

    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


if __name__ == "__main__":
    result = ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(ctypes.byref(UniqueId()))
    print("ncclGetUniqueId:", result, flush=True)
