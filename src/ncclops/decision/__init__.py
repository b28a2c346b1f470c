"""What an attempt comes to and whether it is tried again. Pure: values in, values out."""
