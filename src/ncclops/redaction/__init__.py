"""Removes secrets from what is written or shown, by one set of rules.

- ``rules.toml``   the rules, as data
- ``redactor``     applies them to variables, lines and JSON documents
"""
