"""How agents that need no registration become a workflow: functions, framework objects, and their model clients.

In: a function or an agent object. Out: a function of the workflow whose model calls are recorded. Read `python` first;
`frameworks` is what the modules of `integrations/frameworks` build on, and `translation` the transport under their
clients.
"""
