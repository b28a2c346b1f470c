"""Starts workers quickly: imports torch once and forks, before it has any thread.

A line of JSON on stdin starts a worker:
``{"rank", "env", "scenario", "parameters", "directory"}``. A scenario
``module:function`` is a program of another module than ``scenarios``.
The answer on stdout is its pid; the exit status goes to ``<directory>/exit-<rank>``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve until stdin ends."""
    sys.path.insert(0, str(Path(__file__).parent))
    import scenarios

    signal.signal(signal.SIGCHLD, lambda *_: None)
    # torch looks up the name of 127.0.0.1 at each connection: 5 s where no name server answers
    ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            # The worker gets a parent of its own, which alone may wait for it and notes the end.
            worker = os.fork()
            if worker == 0:
                _work(request, scenarios)
            sys.stdout.write(f"{worker}\n")
            sys.stdout.flush()
            os.close(0)
            os.close(1)
            _, status = os.waitpid(worker, 0)
            path = Path(request["directory"]) / f"exit-{request['rank']}"
            draft = path.with_suffix(".tmp")
            draft.write_text(str(os.waitstatus_to_exitcode(status)))
            draft.replace(path)
            os._exit(0)


def _work(request: dict[str, Any], scenarios: Any) -> None:
    directory, rank = Path(request["directory"]), request["rank"]
    log = os.open(directory / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(request["env"])
    code = 70
    try:
        module, _, program = request["scenario"].partition(":")
        if program:
            found = getattr(importlib.import_module(module), program)
            scenarios.SCENARIOS[request["scenario"]] = found
        scenarios.run(request["scenario"], rank, directory, request["parameters"])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - becomes the exit code
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
