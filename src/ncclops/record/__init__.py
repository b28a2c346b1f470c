"""The run directory: its file names, and the files that more than one package writes or reads."""
