"""What each rank is doing right now, written down: stacks, flight recorder, groups, GPU.

From inside the worker where it answers, from outside (signals, ``/proc``) where it does not.
"""
