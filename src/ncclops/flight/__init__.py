"""Flight recorders read: which rank hung first, where, and why. Never imports torch.

What there is (impure: files, processes, a socket):
- ``sources``      what a path holds: a run, an incident, a folder of dumps
- ``reader``       dumps read in processes with limits (``reader_process``)
- ``rank_files``   the small files of a rank's snapshot
- ``ras_client``   a query to NCCL's own service; ``torch_opinion``: torch's own analyser

What it says (pure):
- ``decode``, ``parse``, ``columns``   bytes to a rank's record
- ``rank_place``                       where a rank stands, by its stacks
- ``groups``       each rank's entries side by side, by process group
- ``disagreements`` where ranks made different calls; ``waits``: which rank waits for which
- ``findings``     what is wrong (``analysis_context``, ``absences``, ``stalled_transfers``)
- ``report``       the result as JSON and, with ``sentences``, in a sentence
- ``ras``          the answer of NCCL's service
"""

from ncclops.flight.analysis_context import FlightFinding
from ncclops.flight.report import FlightReport, analyze, judge

# Their names until 0.1: other packages have findings and reports, too.
Finding, Report = FlightFinding, FlightReport

__all__ = ["Finding", "FlightFinding", "FlightReport", "Report", "analyze", "judge"]
