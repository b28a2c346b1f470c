"""``ncclops self-check``: what works on this machine, found out by doing it.

``node`` has all findings; ``checks`` looks at single things, ``job`` starts a job of two ranks that
restarts once, and ``checks.toml`` says what each check wants and what to do, as preflight's does.
"""
