"""The environment variables that the agent sets for a worker."""

# PID of the agent, which the worker must not outlive (``parent_death``); removed once read.
AGENT_PID = "NCCLOPS_AGENT_PID"
# The worker's end of the socket for commands (``agent_commands``); removed once read.
COMMANDS_FD = "NCCLOPS_COMMANDS_FD"
# Absolute path and name of the run, for scripts that want to add to its record.
RUN_DIR = "NCCLOPS_RUN_DIR"
RUN_ID = "NCCLOPS_RUN_ID"
# What happens to this worker after a fault: in-process, process or none.
RESTART = "NCCLOPS_RESTART"
# When this attempt began, in seconds since the epoch.
STARTED = "NCCLOPS_STARTED"
# eager or lazy: when NCCL communicators are made. Absent: the script decides (``group_defaults``).
NCCL_INIT = "NCCLOPS_NCCL_INIT"
# standard or skipped: the barrier after init_process_group (``group_defaults``). Absent: standard.
BOOTSTRAP_BARRIER = "NCCLOPS_BOOTSTRAP_BARRIER"
# JSON: every timeout that a worker applies, and the budget of restarts in place; see
# ``timeouts.handed_over``.
LIMITS = "NCCLOPS_LIMITS"
# Why the attempt before this one asked for new processes; absent where it did not.
RESPAWNED_FOR = "NCCLOPS_RESPAWNED_FOR"
# How many ranks train, where more take part: the others are in reserve (``in_process``).
ACTIVE_RANKS = "NCCLOPS_ACTIVE_RANKS"
# 1: the worker takes the place of a rank that was lost (``ncclops.restart``'s own name for it).
RETURNING = "NCCLOPS_RETURNING"
# With RETURNING: the script wraps itself, which the worker need not find out; removed once read.
OWN_WRAPPER = "NCCLOPS_OWN_WRAPPER"
# The worker has the launcher's standard input (``attached``); removed once read.
ATTACHED = "NCCLOPS_ATTACHED"
# How often `restart.snapshot` takes snapshots, whatever the script says (its own name for it). Also
# for people to set: where `launch` sets nothing, it stays as it is.
SNAPSHOT_EVERY = "NCCLOPS_SNAPSHOT_EVERY"
# nvrx: the worker serves the import name of NVIDIA's in-process wrapper (``restart.alias``). Not
# among ``OURS``: a user or a profile sets it, and the processes of a worker may want to know.
COMPAT = "NCCLOPS_COMPAT"
# off: nobody is told of the run, whatever the profile says. For people to set, and for a run that
# is none of theirs, as that of the self-check.
NOTIFY = "NCCLOPS_NOTIFY"
# The names of the job's nodes, by their numbers; absent on a single node.
NODES = "NCCLOPS_NODES"

# The job's name space in a store that others may use, also for people to set.
STORE_PREFIX = "NCCLOPS_STORE_PREFIX"

OURS = (
    AGENT_PID,
    COMMANDS_FD,
    RUN_DIR,
    RUN_ID,
    RESTART,
    STARTED,
    NCCL_INIT,
    BOOTSTRAP_BARRIER,
    LIMITS,
    RESPAWNED_FOR,
    ACTIVE_RANKS,
    RETURNING,
    OWN_WRAPPER,
    ATTACHED,
    NODES,
)
