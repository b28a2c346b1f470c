"""Getting threads out of the wrapped function: ``main_thread`` exactly once, and wherever it is.

``delicate`` places, where nothing is raised; ``handled``, whether an exception was dealt with when
another came on top of it; ``signal_handlers`` of the program, kept out of our own code;
``other_threads`` of the script, and ``threads``, what can be done to one at all.
"""
