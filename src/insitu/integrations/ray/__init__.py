"""Runs the episodes of a run on the machines of a Ray cluster (`general.executor: {_type: ray}`).

In goes what `evaluation` passes to any executor: a dataset row, the key of an episode, and its options; out comes its
episode. Each worker is a process that builds the workflow of the file once and runs many episodes at the same time,
with the gateway and the recorder beside them. Start with `worker.py`, which needs no Ray, then read `pool.py`.
"""
