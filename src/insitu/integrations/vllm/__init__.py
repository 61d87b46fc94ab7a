"""vLLM servers as the sampler: tokens in, tokens and logprobs out; start reading at sampler.

sampler   the implementation of `inference.sampler.Sampler`: completions, and what happens without an answer
fleet     which servers have which weights, which are used, and which of them gets a completion
replica   one server: its weights, and the requests to it
probe     whether a server has the right model
servers   the servers that the backend starts itself

Templates, stop strings, tool calls and the format of responses are the backend's own, whatever samples.
"""
