"""Training: from rows to new weights; start reading at jobs, then learner.

jobs            the queue of training jobs: submit, follow, cancel
learner         the weights of a policy from job to job, and one learner per policy
optimizer_loop  the optimizer steps of one job
batches         rows to optimizer steps, micro-batches and tensors; the log-probabilities of their tokens
losses          the loss family as pure functions
policy          the trainable weights, all of them or LoRA adapters, and their checkpoints
"""
