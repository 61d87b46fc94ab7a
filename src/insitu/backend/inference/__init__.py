"""Sampling: from a chat request to tokens and back.

completions  the endpoint; chat and toolcalls read a request, answers writes the response, tokens is text <-> ids
engine       continuous batching over versions of the weights; lane: the requests that share one of them
runner       the model's forward pass in shapes whose rows do not depend on each other; cache: its keys and values
sampling     from logits to tokens, reproducibly
"""
