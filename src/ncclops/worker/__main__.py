"""``python -m ncclops.worker [-m] SCRIPT_OR_MODULE [ARGUMENT ...]``."""

from __future__ import annotations

import sys

# `python -m` has put the current directory first, where `python SCRIPT` has the script's: what
# lies there must not shadow a module that is imported before the script runs.
if not sys.flags.safe_path:
    del sys.path[0]

import os
from functools import partial

from ncclops.forensics import witness
from ncclops.worker import groups, last_resort, orders, script, tether, updates
from ncclops.worker.variables import RESTART, RUN_DIR

tether.tie_to_agent()
witness.start_worker(os.environ, RUN_DIR)
orders.listen()
orders.on("abort", last_resort.abort_groups)
updates.count()
groups.apply(groups.GroupRules.from_environ(os.environ))
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
