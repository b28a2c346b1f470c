"""What a harness raises, and what it has a rank raise.

::

    NcclopsError
    └── HarnessError
        ├── DeadlineExceeded     the job did not end in time
        ├── FaultDidNotStrike    a fault's rank never came to its place
        ├── LeftBehind           a process of the job is still there after its end
        └── RankFailed           a rank has no value that could be compared
    RuntimeError
    └── InjectedFault            what ``Fault.exception`` raises
"""

from __future__ import annotations

from ncclops.errors import NcclopsError


class HarnessError(NcclopsError):
    """A job could not be run to its end, or did not do what the test is about."""


class DeadlineExceeded(HarnessError):
    """The job did not end in time; the message ends with the stacks of its ranks."""


class FaultDidNotStrike(HarnessError):
    """A fault's rank did not come to its place often enough: the test would test nothing."""


class LeftBehind(HarnessError):
    """A process of the job is still there although all ranks have ended."""


class RankFailed(HarnessError):
    """A value was asked for of ranks that returned none, or not the same."""


class InjectedFault(RuntimeError):
    """Raised in a rank by ``Fault.exception``."""
