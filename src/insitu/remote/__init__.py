"""The same attempt at an episode in another process: `client` and `service` are the two ends of a workflow service.

In: a dataset row, the key of an episode and its options. Out: the episode, streamed as lines (`attempt_records`,
read it first). `hosted` keeps the workflows that a process has built for others.
"""
