"""Secrets out of what is written down or shown, by one set of rules for all who write.

- ``rules.toml``   the rules, as data
- ``redactor``     applies them to variables, lines and JSON documents
"""
