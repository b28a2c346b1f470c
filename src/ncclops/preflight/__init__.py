"""Preflight: which node, port or edge will break the job, told before it starts.

    model       a finding, a node's report; JSON both ways
    catalogue   the checks as data (checks.toml): thresholds with sources, severity, remedy
    machine     what this machine says of itself, read under a root, with deadlines
    readings    the same as values: what checks look at, and what tests make up
    checks      from readings to findings; pure
    node        all of it for one node
    table       a report as people read it
    hand_over   what schedulers take over: a reason, a list of hosts, Prometheus' text format

What cannot be known is CANNOT-TELL, never FAIL: a healthy node that is refused costs more trust
than a sick one that is found later.
"""
