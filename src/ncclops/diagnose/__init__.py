"""Incidents and running jobs explained: which rank, which line of whose code, what it waits for."""
