"""Failure classification: what failed, which line proves it, may it be retried."""
