"""A run packed for a ticket: its records in one archive, secrets taken out by rules it shows.

pack         the archive: a run's records, cut where they are too long, and a manifest

What counts as a secret is data of ``ncclops.redaction``.
"""
