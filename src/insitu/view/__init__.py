"""Shows runs in a browser.

In: run directories, read by `runs/reader` and `runs/index`. Out: the page in `static/`, and JSON below `/api/`.
`server` answers requests, `run_pages` has the opened folder, its runs and what changes in them, `episode_lists` and
`episode_pages` answer from the indexes of the runs that are looked at. Read `server` first.
"""
