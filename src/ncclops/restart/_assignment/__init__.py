"""Which rank is who after a fault: pure functions over a ``world``, ``tree`` the largest of them.

``base`` is what a rank assignment is made of, ``planning`` how one is run. The assignments that
users name are in ``rank_assignment``.
"""
