"""Flight recorders read: which rank hung first, where, and why. Never imports torch.

- ``sources``      what a path holds: a run, an incident, a folder of dumps
- ``reader``       dumps read in processes with limits (``reader_process``, ``decode``, ``parse``)
- ``rank_files``   the small files of a rank's picture; ``stacks``, ``frames``: where it stands
- ``groups``       each rank's entries side by side, by process group
- ``compare``      where ranks asked for different things; ``waits``: who waits for whom
- ``findings``     what is wrong; ``report``: told in a sentence and in JSON
- ``ras``          the view of NCCL's own service; ``torch_opinion``: of torch's analyser
"""

from ncclops.flight.report import Report, analyze, judge

__all__ = ["Report", "analyze", "judge"]
