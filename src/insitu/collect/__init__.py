"""Runs the workflow on dataset rows and scores the episodes: rows x generations to scored groups.

In: a configuration and its builder. Out: finished episodes (`collector`, read it first), the conversations in them,
and evaluations with their files (`evaluation`). `executors` says what runs the attempts; the modules `comparisons`,
`judgements` and `python_scores` are the built-in evaluators.
"""
