"""Whether a rank is hung, slow or stalled: pure rules over counters; the time is an argument.

``probes`` is the one module here that reads anything: pages, processes and GPUs.
"""
