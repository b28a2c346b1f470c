"""What a worker tells the agent: one JSON object a line, in a file of its own.

The agent follows the file and takes the lines over into the run's ``events.jsonl``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ncclops.record.variables import RUN_DIR

FILE_NAME = "worker.jsonl"

# Before any restart gives this process another number.
_RANK = os.environ.get("RANK", "0")


def tell(event: str, **fields: Any) -> None:
    """Append an event; outside `launch`, and on a full disk, nothing happens."""
    run_dir = os.environ.get(RUN_DIR)
    if run_dir is None:
        return
    line = json.dumps({"ts": time.time(), "event": event, **fields}) + "\n"
    try:
        with (Path(run_dir) / "ranks" / _RANK / FILE_NAME).open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError:
        return
