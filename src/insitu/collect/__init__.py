"""Runs the workflow on dataset rows and scores the episodes: rows x generations to scored groups.

In: a plan and the builder of its file. Out: each group as it completes (`collector`, read it first), or an evaluation
with its files (`evaluation`). `episodes` runs one episode, here or where an executor says; `evaluators` scores it,
`conversations` makes trajectories of it, `watchdog` says what is waited for, `rescoring` scores recorded ones again.
`comparisons` and `scores` are the built-in evaluators.
"""
