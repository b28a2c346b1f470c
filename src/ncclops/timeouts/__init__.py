"""Every timeout of a run: the order in which they must fire, and what workers apply."""
