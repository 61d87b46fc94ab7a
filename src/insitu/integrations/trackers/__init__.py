"""Experiment trackers, one module each: `finetuning.report_to` names them.

In: the metrics of each epoch, from a process beside the run (`insitu.training.trackers`). Out: the same numbers in the
tracker. Read `tensorboard` first.
"""
