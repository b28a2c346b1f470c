"""See and steer a run from outside.

The agent keeps a small HTTP server as a child process. What it shows is read from the run
directory, like all readings of a run; what changes the run goes to the agent over a socket pair:

    curl, Prometheus, `ncclops status|stop`  --HTTP-->  server  --socket pair-->  agent
                                                          |  reads
                                                          v
                                                     run directory

- ``commands``               what may be asked of a run, and what the agent offers (``Controls``)
- ``server_process``         the agent's side: the child, its sockets, its commands
- ``server``, ``routes``     the child: what is answered to which request
- ``http``                   one HTTP connection, with limits on everything
- ``address``, ``client``    the socket and the token of a run, found by its directory
- ``status``, ``events``     what is known of a run: the values, and the fold over its events
- ``reading``, ``ranks``, ``gpu_memory``
                             the edges: files of the run, memory of its processes and GPUs
- ``compare``, ``merge``     what follows from all ranks together; several nodes as one
- ``metrics``                the status in Prometheus' format
- ``runs``                   which run is meant
"""
