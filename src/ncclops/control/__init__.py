"""See and control a run from outside: the HTTP server of a run, and its clients.

The agent keeps a small HTTP server as a child process. What it shows is read from the run
directory, like all readings of a run; what changes the run goes to the agent over a socket pair:

    curl, Prometheus, `ncclops status|stop`  --HTTP-->  server  --socket pair-->  agent
                                                          |  reads (``ncclops.status``)
                                                          v
                                                     run directory

- ``commands``              what may be asked of a run, and what the agent offers (``Controls``)
- ``server_process``        the agent's side: the child, its sockets, its commands
- ``server``, ``routes``    the child: what is answered to which request
- ``http``                  one HTTP connection, with limits on everything
- ``client``                the caller's side
"""
