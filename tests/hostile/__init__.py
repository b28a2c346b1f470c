"""Input of hostile content: what workers write and what people hand over, damaged in every way.

``mutations`` damages a file, ``commands`` says what each command may do then. The tests do it a few
hundred times; ``scripts/fuzz.py`` goes on for as long as it is told.
"""
