"""Is a rank hung, slow or stalled: pure rules over counters, with the clock handed in.

``probes`` is the one module here that reads anything: pages, processes and GPUs.
"""
