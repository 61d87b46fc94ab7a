"""Turns the rewards of a group of episodes into the advantages and training rows of their model calls.

Input are the collected groups, output an `EstimatedEpoch`: the trajectories that are trained, the advantages of their
calls and their rows. Everything is a pure function of its arguments.

baselines    advantages within a group: baseline and scale
credit       which reward a call is judged by: its episode's, its step's or its function's
targeting    which calls are trained, and which function a call is credited to
estimator    the whole of it for an epoch; read this first
"""
