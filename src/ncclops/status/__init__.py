"""The state of a run at one moment, computed from its run directory."""
