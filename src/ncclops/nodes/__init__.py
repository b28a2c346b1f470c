"""Several hosts: who takes part, what the agents tell each other, and what must be alike.

- ``schedulers``   what Slurm, Open MPI or Kubernetes says of this node (``hostlist``)
- ``meeting``      how the nodes of a job are to find each other: the options, as values
- ``interfaces``   which addresses are this host's own
- ``member``       a process of its own: torch's rendezvous, and the agents' log in the store
- ``log``          the log itself: one order of records for all agents
- ``pulse``        who watches whom, and who is taken for lost; pure
- ``peers``        the agent's end of all this, in its event loop
- ``fingerprint``  what a node is like, and what differs between nodes
"""
