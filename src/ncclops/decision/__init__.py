"""The result of an attempt, and whether another follows. Pure: values in, values out."""
