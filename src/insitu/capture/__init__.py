"""Records what crosses the wire between an agent and its models.

In: requests for completions and their responses, as an HTTP client or the gateway passes them on. Out: the ModelCalls
of an episode, with token ids and logprobs as sampled. Read `ledger` first (what an episode keeps), then `recorder`.
"""
