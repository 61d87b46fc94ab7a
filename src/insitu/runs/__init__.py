"""The run directory: what writes, reads, continues, copies and shows the files of a run.

In: finished groups, metrics and jobs. Out: plain files, and everything that is derived from them. `files` names every
file, `records` says what their lines hold, `forms` what readers rely on, `store` writes those of a run in progress,
`reader` reads them. `resume`, `fork` and `replay` begin with recorded files, `index`, `episodes` and `summary` show
them. Read `files` first.
"""
