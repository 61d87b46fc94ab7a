"""Datasets, evaluators, and the scheduler that runs the workflow on rows x repetitions."""
