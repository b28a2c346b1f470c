"""Several nodes as one job: rendezvous, the agents' shared log, who is lost, what must be alike."""
