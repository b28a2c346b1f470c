"""Hang forensics: pictures of every rank taken before anything is torn down, and their telling.

In a worker (torch is looked at only where the script has loaded it):

- ``witness``    answers requests for a picture; its C-level stack dump works with the GIL held
- ``picture``    what a rank says about itself: recorder, stacks, groups, GPU
- ``collector``  has the picture taken on a fault, before the groups are aborted

From outside:

- ``observer``   the guardian's eyes: a process that hangs or has died
- ``collect``    pictures of all ranks of a run, with or without their help
- ``where``, ``told``  what the pictures say, of a running job and of an incident

``layout`` owns the file names.
"""
