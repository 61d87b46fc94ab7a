"""The trainers: an epoch from its plan to new weights, and the checks, validations and reports around it.

In: a checked file and its components. Out: trained weights, and records for the run's directory, which `runs` writes.
Read `loop` first; `episodes_builder` makes the plan of an epoch: which rows are played, and how often.
"""
