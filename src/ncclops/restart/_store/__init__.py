"""How a rank reaches the job's store: ``client`` is one thread's connection, ``connections`` those
of a process, ``relay`` the process that talks to the store for all ranks of a host, and
``relay_client`` a rank's side of it; ``addresses`` and ``variables`` are what names of hosts and
the environment say. What ranks agree on through it is in ``ledger``.
"""
