"""The run directory: what writes, reads, continues, copies and shows the files of a run.

In: finished groups, metrics and jobs. Out: plain files, and everything that is derived from them. `files` names every
file, `store` is their only writer, `reader` their only reader; `index` is what lists and pages search. Read `files`
first.
"""
