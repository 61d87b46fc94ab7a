"""Several processes that train one policy together, started by `torchrun`: DDP or FSDP2; start reading at group.

group   the processes as the backend sees them: started, given jobs, and started again after one of them has ended
rank    one of the processes: what it exchanges with the others, and with the backend
heartbeat  by which the backend notices a process that has stopped

Both sides load weights, compute losses and write checkpoints by `insitu.backend.learner`: one process is the same code.
"""
