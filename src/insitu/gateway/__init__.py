"""Records external agents: other programs, services, and clients of other APIs.

In: their requests to OpenAI's API, or to one that `formats.dialects` translates. Out: completions of the workflow's
models, recorded like every other call. Read `server` first (the gateway; `endpoint` is what it has of an episode, with
its limits and its pace), then `agents` (the workflows `command` and `http`) and `workspaces` (a folder and a sandbox
per episode of `command`).
"""
