"""Receipts: what a training run shows for itself, and the judgement whether that is enough.

Scripts report through ``ncclops.receipt``. Here is the rest:

- ``recorder``, ``writer``   the worker's side: records, hooks for the worker entry
- ``progress``, ``stop``     shared memory between a worker and its agent (``pages``)
- ``observation``, ``tally`` what was seen, from records or from printed lines, summed up
- ``forms``, ``logscan``     the lines of the common trainers, and the reader of logs
- ``judge``, ``sources``     the five rules, and the files they are applied to
- ``stalls``, ``hang``       the watch while a run is under way, with the clock handed in
- ``stragglers``             step times compared over ranks
- ``probes``, ``gpu``        the edges: processes through psutil, GPUs through NVML
"""
