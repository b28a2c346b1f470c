"""``python -m ncclops.compat [-m] SCRIPT_OR_MODULE [ARGUMENT ...]``; also after ``torchrun -m``."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m` has put the current directory first, where `python SCRIPT` has the script's: what
# lies there must not shadow a module that is imported before the script runs.
if not sys.flags.safe_path:
    del sys.path[0]

from ncclops.restart import alias
from ncclops.worker import script

alias.serve_or_exit()
match sys.argv[1:]:
    case ["-m", name, *arguments]:
        script.run_module(name, arguments)
    case [path, *arguments] if not path.startswith("-"):
        if not Path(path).exists():
            print(f"ncclops.compat: script {path} does not exist: check the path", file=sys.stderr)
            sys.exit(2)
        script.run_script(path, arguments)
    case _:
        print(
            "usage: python -m ncclops.compat [-m] SCRIPT_OR_MODULE [ARGUMENT ...]", file=sys.stderr
        )
        sys.exit(2)
