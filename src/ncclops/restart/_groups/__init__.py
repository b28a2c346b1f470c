"""torch's process groups over a restart: made, aborted, ended, kept, given new members.

``aborting`` is what a restart does with all of them, ``ending`` how one ends without a deadlock,
``rendezvous`` and ``tables`` how they are made and known to torch, ``backends`` and ``recorder``
what they are and have pending. The default group outlives a restart in ``kept_default``, one of
NCCL in ``revoking``, and ``regrouping`` brings it to its new ``members``, in one of three ways:
``in_place`` for Gloo, ``shrinking`` and ``reconfiguring`` for NCCL, which act in ``attempts``.
Groups beside it are made by ``beside`` and outlive one in ``kept_beside``. ``open_operations``,
``gloo_sockets`` and ``cuda_graphs`` are what an abort would otherwise miss or spoil.
"""
