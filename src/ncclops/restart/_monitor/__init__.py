"""Monitor processes: one small process beside each rank, that outlives what the rank cannot tell.

``main`` is that process (standard library only), ``ring`` how it watches the next one, ``link`` the
memory and the messages that it shares with its rank, ``main_process`` the rank as it sees it,
``outside`` what it adds to the rank's snapshots. The rank's side: ``client``, and ``reports`` that
it records for others.
"""
