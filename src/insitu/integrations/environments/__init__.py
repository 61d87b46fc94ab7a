"""Environments that others publish, as workflows.

In goes a dataset row; the environment says what the model is asked and what its answers lead to; out comes an `Outcome`
with the environment's reward, which the evaluator of the same name reads. Each folder is one kind of environment, and
imports the packages behind it only when a file names it. `tool_loop` is shared by those whose environments have tools:
read it first.
"""
