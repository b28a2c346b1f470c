"""``ncclops status --watch``: a run on a terminal, drawn again as it goes on, with keys.

Pure, values in and values out:

- ``lines``       styled text of one line that is fit for a terminal, cut to its width
- ``keys``        what was typed, out of bytes
- ``words``       durations and numbers, short
- ``order``       which ranks one would look at first
- ``overview``    lines about the run, and the table of its ranks
- ``history``     what events say of the time that a run has taken, and of what has happened
- ``timeline``    the last hour as a bar, and as a list
- ``view``        which page is shown, which rank is chosen, and what a key changes in that
- ``composing``   all of it as one frame of so many lines and columns

At the edge:

- ``pages``       a rank's log, the stacks of all ranks, an incident: read, as lines
- ``page_reader``  has them read, in threads (``aside``), and logs again as they grow (``growth``)
- ``terminal``    the terminal's modes and signals, and a frame drawn over the one before
- ``watching``    the loop: waits for keys, for growing files and for answers, and draws
"""
