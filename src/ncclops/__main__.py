"""The command: ``ncclops``, and ``python -m ncclops``.

Ctrl-C ends it without a traceback from here on: while its modules are imported, which takes longer
than most commands do, and while Python ends.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

_INTERRUPTED = 130  # as `errors.EXIT_INTERRUPTED`; nothing of ours is imported yet


def main() -> NoReturn:
    """Run the command line and exit with the code that the contracts promise."""
    # Ignored, as in a shell's background, it stays so.
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from ncclops.cli import main as run

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    finally:
        # What was asked for is done. Python's own end takes no interruption without a traceback.
        if is_heard:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
