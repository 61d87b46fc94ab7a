"""Sampling: from prompt token ids to completions; start reading at sampler.

sampler      the interface of what samples, with what all implementations share (`integrations/vllm` is the other one),
             and the names of models in requests
engine       the embedded sampler: continuous batching over every weight version in use; how many tokens fit
scheduler    the sequences of one weight version: waiting -> prefilling -> running -> finished
kv_pool      keys and values: blocks of prompts in one pool, windows of running sequences
runner       the model's forward pass; batches: its attention; batch_shapes: batches whose rows do not affect each other
cuda_graphs  steps of a GPU that are recorded once and replayed
sampling     from logits to tokens, reproducibly
structured   which tokens may come next in a structured output or a forced call
tokenizer    chat template, encoding, incremental detokenization, stop strings
"""
