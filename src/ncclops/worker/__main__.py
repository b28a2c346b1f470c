"""``python -m ncclops.worker [-m] SCRIPT_OR_MODULE [ARGUMENT ...]``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from functools import partial

from ncclops.worker import groups, script, tether
from ncclops.worker.variables import GROUP_TIMEOUT_S, RESTART

tether.tie_to_agent()
if limit_s := os.environ.get(GROUP_TIMEOUT_S):
    groups.set_default_timeout(timedelta(seconds=float(limit_s)))
match sys.argv[1:]:
    case ["-m", name, *arguments]:
        run = partial(script.run_module, name, arguments)
    case [path, *arguments]:
        run = partial(script.run_script, path, arguments)
    case _:
        sys.exit("usage: python -m ncclops.worker [-m] SCRIPT_OR_MODULE [ARGUMENT ...]")
if os.environ.get(RESTART) == "in-process":
    from ncclops.worker import in_process

    in_process.run(run)
else:
    run()
