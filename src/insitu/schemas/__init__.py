"""Data models that modules exchange.

components         base classes of component configurations
kinds              the kinds of component
config             the sections of a file, and the checked file
steps              intermediate steps of a workflow
evaluation         dataset items, scores and the result of an evaluation run
finetuning         the documented data models of finetuning; finetuning_parts: blocks of the section `finetuning`
parts              functions that a file chooses, by name or as Python code
episodes           episodes, model calls and training rows
groups             completed groups of episodes
training_jobs      training jobs as sent from an adapter to a backend, with the defaults of their settings
lora               the settings of adapters
documentation      docstrings of fields as descriptions in schemas
installed          what the installed packages declare
backend_processes  the processes of a backend and their memory
"""
