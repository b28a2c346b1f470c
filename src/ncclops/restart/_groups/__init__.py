"""torch's process groups over a restart: made, aborted, released, kept, given new members.

``process_groups`` is what an iteration does with all of them. The default group outlives a restart
in ``kept_default``, and ``regrouping`` and ``shrinking`` bring it to its new members; groups beside
it are made by ``beside`` and outlive one in ``kept_beside``. ``open_operations``, ``gloo_sockets``
and ``cuda_graphs`` are what an abort would otherwise miss or spoil.
"""
