"""A run packed for a ticket: its records in one archive, secrets taken out by rules it shows.

rules.toml   what counts as a secret, as data
pack         the archive: a run's records, cut where they are too long, and a manifest
"""
