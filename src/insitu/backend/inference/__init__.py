"""Sampling: from prompt token ids to completions; start reading at sampler.

sampler      the interface of what samples, with what all implementations share (`integrations/vllm` is the other one),
             and the names of models in requests
engine       the embedded sampler: continuous batching over every weight version in use
scheduler    the slots of one weight version: waiting -> prefilling -> running -> finished
runner       the model's forward pass, and the cache of keys and values; batch_shapes: batches whose rows do not affect
             each other
sampling     from logits to tokens, reproducibly
tokenizer    chat template, encoding, incremental detokenization, stop strings
"""
