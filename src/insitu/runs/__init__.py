"""The run directory: what writes, reads, continues, copies and shows the files of a run.

In: finished groups, metrics and jobs. Out: plain files, and everything that is derived from them. `store` is the only
writer; read it first.
"""
