"""Trainer adapters: clients of the backends that train.

In: groups of trajectories with rewards or training rows. Out: a finished training job.
"""
