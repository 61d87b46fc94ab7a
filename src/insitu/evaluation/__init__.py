"""Runs the workflow on dataset rows and scores the episodes.

In: a configuration and its builder. Out: finished episodes (`collector`, read it first), and evaluations
with their files (`run`). `remote` and `service` are the two ends of a workflow service,
`executors` says what else can run episodes.
"""
