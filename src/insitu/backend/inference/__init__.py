"""Sampling: from prompt token ids to completions; start reading at sampler.

sampler      the interface of what samples, and what all implementations share; `integrations/vllm` is the other one
engine       the embedded sampler: continuous batching over every weight version in use
scheduler    the slots of one weight version: waiting -> prefilling -> running -> finished
runner       the model's forward pass, in batch shapes whose rows do not affect each other; cache: keys and values
sampling     from logits to tokens, reproducibly
tokenizer    chat template, encoding, incremental detokenization, stop strings
model_names  the names of models in requests, and the weights that each selects
"""
