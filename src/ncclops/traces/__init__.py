"""A run as a trace: its events as spans, sent to a collector by OTLP."""
