"""Sampling: from a request to tokens and back.

completions  the endpoint of chat completions and of text completions; tokens is text <-> ids
chat, text   the two kinds: what a request means, how its answer is spelt; requests, answers: what they share
engine       continuous batching over versions of the weights; lane: the requests that share one of them
runner       the model's forward pass in shapes whose rows do not depend on each other; cache: its keys and values
sampling     from logits to tokens, reproducibly
"""
