"""APIs that agents may call instead of OpenAI's completions, each translated to chat completions.

In: a request of the agent, and chunks of the model server's response. Out: a chat request, and the agent's response.
The entry points `insitu.dialects` name a class for each route below `/v1`; `formats/dialects.py` has its interface.
"""
