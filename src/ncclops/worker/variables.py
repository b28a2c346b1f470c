"""The environment variables by which the agent talks to a worker."""

# PID of the agent, which the worker must not outlive (``tether``); removed once read.
AGENT_PID = "NCCLOPS_AGENT_PID"
# Seconds; what process groups get where the script gives no timeout (``groups``).
GROUP_TIMEOUT_S = "NCCLOPS_PROCESS_GROUP_TIMEOUT_S"
# Absolute path and name of the run, for whoever wants to add to its record.
RUN_DIR = "NCCLOPS_RUN_DIR"
RUN_ID = "NCCLOPS_RUN_ID"
