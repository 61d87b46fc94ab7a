"""Runs the episodes of a run on the machines of a Ray cluster (`general.executor: {_type: ray}`).

In goes what any executor gets: a dataset row, the key of an episode, and its options; out comes its episode. Ray only
starts workers: processes that serve the workflow of the file as `insitu serve` does, and the run is their client (see
`insitu.remote`). Start with `worker.py`, which needs no Ray, then read `executor.py`.
"""
