"""Runs a user's workflow: its functions, the models they call, and the context and steps of an episode.

In: the input of a row. Out: its output and, in the episode's scope, its calls, steps and rewards. Read `context` first.
Workflows run in an `event_loop` that a signal ends, and their `programs` as processes that end with it.
"""
