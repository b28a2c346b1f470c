"""The errors a user of the command line can meet, and the exit code each one maps to.

    NcclopsError                exit 1   it ran, and the answer is bad
    ├── UsageError              exit 2   wrong usage, unreadable or invalid input
    │   └── ProfileError        exit 2   a profile that cannot be found, read or understood
    ├── NotNeeded               exit 0   a node in reserve, whose job has ended without it
    ├── PreflightRefused        exit 3   `launch` found a reason not to start
    │   └── NodeUnfit           exit 3   this node is not fit for the job
    ├── NetworkRefused          exit 3   NCCL uses another network than the one that is required
    └── ReceiptMissing          exit 4   workers ended well, the required receipt is not there

Beside them: 70 for a fault of ncclops itself (``EXIT_INTERNAL_ERROR``, as sysexits has it), 130 for
an interruption (``EXIT_INTERRUPTED``). ``ncclops.cli._exit_codes`` has them by command, and
``ncclops.exit_codes`` those of `launch` that can be set.

The message of each is one line in three parts: what is wrong, where, and what to do. The
command line prints it as ``ncclops: error: <message>`` on stderr, without a traceback. A file with
several mistakes has a line for each.
``ncclops.restart`` has a tree of its own (it is usable alone); see ``ncclops.restart.exception``.
"""

from __future__ import annotations

EXIT_INTERNAL_ERROR = 70
EXIT_INTERRUPTED = 130
# Threads that wait for torch's store, and may have been given up. One that torch wakes while Python
# takes itself down ends the process with SIGABRT, so where one is left the command ends at once.
STORE_CALL = "ncclops-store-call"


class NcclopsError(Exception):
    """Base of all errors that end a command; ``exit_code`` is what the process exits with.

    ``lines`` are what is wrong; the message has them all.
    """

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines

    def first_line(self, command: str) -> str:
        """What is wrong first, and how many more there are, which ``command`` shows."""
        first, *more = self.lines
        return f"{first} ({len(more)} more: `{command}`)" if more else first


class UsageError(NcclopsError):
    """Wrong usage, or input that cannot be read or is not valid."""

    exit_code = 2


class ProfileError(UsageError):
    """A profile that is unknown, unreadable or invalid."""


class NotNeeded(NcclopsError):
    """The job has ended, and this node in reserve never took part in it."""

    exit_code = 0


class PreflightRefused(NcclopsError):
    """`launch` refused to start because a check before the start failed."""

    exit_code = 3


class NodeUnfit(PreflightRefused):
    """`launch` refused to start here because this node is not fit: another one may be."""


class NetworkRefused(NcclopsError):
    """NCCL has chosen another network than ``--require-network`` asks for.

    Its message begins with ``option``.
    """

    exit_code = 3
    option = "--require-network"


class ReceiptMissing(NcclopsError):
    """All workers exited 0, but the receipt that was required is not complete."""

    exit_code = 4
