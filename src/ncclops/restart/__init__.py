"""The in-process restart core."""
