"""The life of one run on one node: workers started, watched, stopped, and the verdict written."""
