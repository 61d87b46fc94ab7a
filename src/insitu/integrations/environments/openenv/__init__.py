"""OpenEnv: environments behind a server, as workflows (`_type: openenv`), and insitu's files as such servers.

An episode is one session of a server: a WebSocket over which `reset` and each `step` are answered with an observation,
a reward and whether the episode is done. Its `Outcome` is the workflow's output. Read `sessions.py` first, then
`workflow.py`; `served_file.py` is the other direction. Only `served_class.py`, which runs in a separate process,
imports the package `openenv`. Its client is not used: when a connection is lost, it steps in a new session, which was
not reset.
"""
