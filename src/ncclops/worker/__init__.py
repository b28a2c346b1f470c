"""What runs inside a worker, before and around the user's script.

    python -m ncclops.worker [-m] SCRIPT_OR_MODULE [ARGUMENT ...]

- ``parent_death``    the kernel ends a worker when its agent ends
- ``group_defaults``  process groups get the profile's timeout where the script gives none
- ``in_process``      the script under the restart core (``escalation``: whether that still helps)
- ``script``          the script runs as ``__main__``, exactly as ``python SCRIPT`` would run it
"""
