"""Preflight: which node, port or edge will break the job, told before it starts.

    model       a finding, a node's report; JSON both ways
    catalogue   the checks as data (checks.toml): thresholds with sources, severity, remedy
    machine     what this machine says of itself, read under a root, with deadlines
    readings    the same as values: what checks look at, and what tests make up
    checks      from readings to findings; pure
    site_checks a site's own checks, a command each, from files of theirs
    node        all of it for one node
    table       a report as people read it
    edges       the edges between hosts: probes from each to each, and the smallest cause
    pairs       an all_reduce over the GPUs of two nodes, where one was asked for
    part        a node's part in the check of all nodes of a job, in a process of its own
    hand_over   what others take over: JSON, a reason, a list of hosts, Prometheus' text format

What cannot be known is CANNOT-TELL, never FAIL: a healthy node that is refused costs more trust
than a sick one that is found later.
"""
