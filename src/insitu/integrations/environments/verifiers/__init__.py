"""Tasksets of verifiers (0.4, `verifiers.v1`): their tasks are rows, and their rewards are scores.

A row holds the data of a task. The workflow runs the task in an environment of verifiers, with the harness of insitu or
one of verifiers, sends its model calls through the gateway, and returns an `Outcome` with the rewards of the trace.
The other way round, `export` makes a taskset of a file. Read `tasksets` first (what a taskset is, and its rows), then
`workflow` (an episode), then `harness`.
"""
