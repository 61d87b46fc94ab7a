"""Turns the rewards of a group of episodes into the advantages and training rows of their model calls.

Input are the collected groups, output an `EstimatedEpoch`: the trajectories that are trained, the advantages of their
calls and their rows. Everything is a pure function of its arguments.

credit        which calls of a group are trained, and their advantages: unit of credit, baseline, scale
estimator     the advantages and rows of an epoch; read this first
distillation  the advantage of a sampled token by what a teacher says of it
"""
