"""``python -m ncclops.worker [-m] SCRIPT_OR_MODULE [ARGUMENT ...]``."""

from __future__ import annotations

import os
import sys
from functools import partial

from ncclops.worker import groups, script, tether
from ncclops.worker.variables import RESTART

tether.tie_to_agent()
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
