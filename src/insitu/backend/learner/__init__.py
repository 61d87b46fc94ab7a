"""Training: from rows to new weights; start reading at jobs, then learner.

jobs            the queue of training jobs: submit, follow, cancel, delete old checkpoints
snapshots       which versions get a checkpoint, and which jobs are logged instead
versions        the versions on disk, and which expire, by the rule in `disk/model_files`
states          the weights and optimizer that the next job continues from; trains logged jobs again after a restart
learner         the weights of a policy from job to job, and the learners of all policies
parts           jobs whose rows come in parts, computed as they arrive
optimizer_loop  the optimizer steps of one job
objectives      what each method does with log-probabilities: the loss of an optimizer step
losses          the losses as pure functions
batches         rows, their optimizer steps, the tensors of a micro-batch, trees of prefixes, and the ranks that train
packing         which rows a micro-batch computes, and on which the KL divergence from the start is measured
logprobs        the log-probabilities of trained tokens; prompts that rows share are computed once
logit_offsets   what the parameters of a request added to the logits
code            losses, optimizers and schedules that a job names, by name or as Python code
policy          the trainable weights, all of them or LoRA adapters; checkpoints: their files
"""
