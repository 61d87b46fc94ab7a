"""The nouns that cross a module boundary.

components     configuration blocks and references between them
steps          intermediate steps: what happened inside a workflow, as its framework reports it
evaluation     dataset items, scores and the result of an evaluation run
finetuning     the documented data models of the finetuning harness
episodes       episodes, model calls and training rows
training_jobs  training jobs on their way from an adapter to a backend
"""
