"""Sampling: from prompt token ids to completions; start reading at engine.

engine     continuous batching over every weight version in use, and the model names that select one
scheduler  the slots of one weight version: waiting -> prefilling -> running -> finished
runner     the model's forward pass, in batch shapes whose rows do not affect each other; cache: keys and values
sampling   from logits to tokens, reproducibly
tokenizer  chat template, encoding, incremental detokenization, stop strings
"""
