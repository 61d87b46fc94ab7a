"""Reports a run to experiment trackers (`finetuning.report_to`), by one process for each; start reading at processes.

processes  starts them with a run, and ends them after it
follow     such a process: logs each epoch once, from the files of the run
stream     what is logged of an epoch, and under which names
tracker    the interface of a tracker, which those in `integrations/trackers` implement

A tracker that fails, hangs or is offline neither stops nor slows the run, whose files have everything.
"""
