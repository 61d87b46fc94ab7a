"""Experiment trackers, one module each: `finetuning.report_to` names them.

In: the files of a run. Out: the metrics of each epoch in the tracker. `processes` starts a process for each tracker
with a run, ends it after it, and is such a process; `stream` has what is logged of an epoch, under which names. The
modules are found by the entry points `insitu.trackers`. A tracker that fails, hangs or is offline neither stops nor
slows the run. Read `processes` first, then `tensorboard`.
"""
