"""The edges between hosts: each connects to each where NCCL would, and the smallest cause is named.

::

    model      what is known of a host, what each saw of its edges, and the causes: values, as JSON
    interface  where NCCL would listen on this host, by its rules and variables
    schedule   who connects to whom, on which ports, and which edges are tried again; pure
    wire       the few bytes that two hosts exchange
    listener   answers on a sample of the ports that NCCL might be given
    probe      one connection, an exchange, and what the kernel said where that failed
    rounds     all edges of this host: the first round and, for suspects, the second
    machine    what this host tells the others of itself
    relay      a way to the meeting past a firewall that drops answers
    meeting    how the hosts meet over the job's store: each speaks once a round, one answers all
    states     what became of each edge, from what all hosts saw; pure
    known      causes that need no probe: a host that did not come, two with one address; pure
    replies    edges that fail for the rule of the opposite edge; pure
    explain    the smallest set of causes for all edges that failed; pure
    judge      all of it: what came of the meeting -> the verdict; pure
    sentences  the causes of a verdict, for people
    shown      the verdict as it is shown and handed over: table, JSON, reason, hosts
    run        from the first listener to the verdict, under one deadline
"""
