"""Weights and data that leave a run: exported models and their cards, uploads, promotion, exported trajectories.

In: a finished run. Out: a folder or file that others can use. Read `model_export` first.
"""
