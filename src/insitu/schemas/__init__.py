"""The nouns that cross a module boundary; nothing in this package does anything.

components   what a registered component's configuration is made of
steps        intermediate steps: what happened inside a workflow, as its framework told it
evaluation   dataset items, scores and the result of an evaluation run
finetuning   the documented data models of the finetuning harness
episodes     episodes, model calls and training rows: what capture writes and training reads
wire         training jobs as they travel between an adapter and a backend
"""
