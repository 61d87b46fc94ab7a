"""Tasksets of verifiers (0.4, `verifiers.v1`): their tasks are rows, and their rewards are scores.

In goes a row with the data of a task; verifiers' environment runs it with our harness, or one of its own, and calls
the model through the gateway; out comes an `Outcome` with the rewards of the trace. The other way
round, `export` makes a taskset of a file. Read `tasksets` first (what a taskset is, and its rows), then `workflow` (an
episode), then `harness`.
"""
