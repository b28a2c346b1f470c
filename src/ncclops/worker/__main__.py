"""``python -m ncclops.worker [-m | -f] SCRIPT_OR_MODULE_OR_FUNCTION [ARGUMENT ...]``."""

from __future__ import annotations

import sys

# `python -m` has put the current directory first, where `python SCRIPT` has the script's: what
# lies there must not shadow a module that is imported before the script runs.
if not sys.flags.safe_path:
    del sys.path[0]

import os
from functools import partial

from ncclops import capture
from ncclops.capture import snapshot_server
from ncclops.receipts import recorder
from ncclops.receipts.collectives import CollectiveCounter
from ncclops.record import worker_record
from ncclops.record.variables import COMPAT, RESTART, RUN_DIR
from ncclops.record.worker_commands import AbortCommand, TightenCommand
from ncclops.restart import alias
from ncclops.restart._interrupt.threads import main_thread_wait
from ncclops.restart.waiting import main_thread_is_in_collective
from ncclops.timeouts import handed_over
from ncclops.worker import (
    agent_commands,
    attached,
    exiting,
    fork_server,
    group_defaults,
    last_resort,
    log_output,
    network_open,
    optimizer_steps,
    own_wrapper,
    parent_death,
    script,
)
from ncclops.worker.group_timeouts import GroupTimeouts
from ncclops.worker.meeting import Team
from ncclops.worker.start_up import StartUp
from ncclops.worker.timeout_phases import TimeoutPhases
from ncclops.worker.waits import Waits

# Before the fork server imports what registers callbacks at exit: multiprocessing's waits for the
# script's children, and has to run before a worker says that only its end is left.
exiting.watch()
fork_server.serve_if_asked()  # returns in workers alone
worker_record.own_rank()
parent_death.tie_to_agent()
log_output.keep_printing()
script.quote_files_only()
snapshot_server.start_worker(os.environ, RUN_DIR)
capture.install()
if os.environ.get(COMPAT) == "nvrx":
    alias.serve_or_exit()
agent_commands.listen()
attached.install()
agent_commands.on(AbortCommand, last_resort.abort_groups)
optimizer_steps.count()
counter = CollectiveCounter(recorder.current(), main_thread_is_in_collective, main_thread_wait)
network_open.follow(counter)
counter.start()
Waits(recorder.current()).follow()
match sys.argv[1:]:
    case ["-m", name, *arguments]:
        start = partial(script.run_module, name, arguments)
    case ["-f", name, *arguments]:
        start = partial(script.run_function, name, arguments)
    case [path, *arguments]:
        start = partial(script.run_script, path, arguments)
    case _:
        sys.exit("usage: python -m ncclops.worker [-m|-f] SCRIPT_MODULE_OR_FUNCTION [ARGUMENT ...]")
starting = StartUp(counter)
run = starting.observed(start)
given = handed_over.from_environ(os.environ)
group_timeouts = None if given is None else GroupTimeouts(given[0])
rules = group_defaults.GroupRules.from_environ(os.environ)
group_defaults.apply(rules, group_timeouts, Team.from_environ(os.environ))
phases = None
if given is not None and group_timeouts is not None:
    phases = TimeoutPhases(given[0], group_timeouts)
    phases.follow(recorder.current())
    agent_commands.on(TightenCommand, phases.on_command)
if os.environ.get(RESTART) == "in-process" and given is not None and phases is not None:
    from ncclops.worker import in_process

    run = partial(in_process.run, run, *given, phases, starting)
else:
    own_wrapper.watch(phases)
exiting.observed(run)
