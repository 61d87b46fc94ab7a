"""Training: from rows to new weights; start reading at jobs, then learner.

jobs            the queue of training jobs: submit, follow, cancel, delete old checkpoints
learner         the weights of a policy from job to job, and the learners of all policies
parts           jobs whose rows come in parts, computed as they arrive
optimizer_loop  the optimizer steps of one job
objectives      what each method does with log-probabilities: the loss of an optimizer step
losses          the losses as pure functions
batches         rows to optimizer steps, micro-batches and tensors, and the ranks that share them
logprobs        the log-probabilities of trained tokens; prompts that rows share are computed once
policy          the trainable weights, all of them or LoRA adapters; checkpoints: their files
"""
