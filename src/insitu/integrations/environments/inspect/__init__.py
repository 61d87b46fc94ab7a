"""Tasks of inspect_ai, as workflows to train and evaluate.

In: a task, whose samples are rows (`dataset: {_type: inspect}`), and whose solvers and scorers run in worker processes.
Out: the scores of each sample, as an `Outcome`. Read `workflow` first (the components), then `pool` (the workers as
seen from here) and `worker` (the program that they run). `evaluation` is `insitu eval --task`.
"""
