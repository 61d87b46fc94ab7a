"""Tasksets of verifiers (0.4, `verifiers.v1`): their tasks are rows, and their rewards are scores.

A row has the data of a task. verifiers' environment plays it with our harness, or one of its own, whose model calls
pass the gateway; the workflow returns an `Outcome` with the rewards of the trace. The other way round, `export` makes
a taskset of a file. Read `tasksets` first (what a taskset is, and its rows), then `workflow` (an episode), then
`harness`.
"""
