"""Stacks of Python threads: one type of frame, one parser, one rule for whose code a frame is.

- ``frame``      a line of code that was being executed
- ``parsing``    text of faulthandler, py-spy and tracebacks to frames
- ``ownership``  which frame is the user's own
"""
