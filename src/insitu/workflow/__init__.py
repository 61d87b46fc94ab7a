"""Runs a user's workflow: its functions, the models they call, and the context and steps of an episode.

In: the input of a row. Out: its output and, in the episode's scope, its calls, steps and rewards. Read `context` first.
"""
