"""The import name of NVIDIA's in-process wrapper, served by ncclops.

``python -m ncclops.compat [-m] SCRIPT_OR_MODULE [ARGUMENT ...]`` runs a script that imports
``nvidia_resiliency_ext.inprocess`` without a change: Megatron-LM, for one. Under ``ncclops launch``
``--compat nvrx`` does the same. Where processes are started by multiprocessing's ``spawn``, which
import the script anew, call :func:`serve` in its first lines instead.
"""

from ncclops.restart.alias import serve

__all__ = ["serve"]
