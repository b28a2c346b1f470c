"""Receipts: what a training run reports of itself, and the judgement whether that is enough.

Scripts report through ``ncclops.receipt``. Here is the rest:

- ``recorder``, ``writer``, ``memory``, ``collectives``  the worker's side of those calls
- ``observation``, ``receipt_facts``  what was seen, from records or printed lines, summed up
- ``log_formats``, ``log_scan``, ``log_receipts``  the lines of common trainers, and their reader
- ``judge``, ``sources``    the five rules, and the files they are applied to
"""
