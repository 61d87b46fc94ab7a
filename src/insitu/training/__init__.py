"""The built-in trainer and the files of a run.

In: a checked file. Out: a run's directory and trained weights. Read `loop` first.
"""
