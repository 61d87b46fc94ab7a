"""Shows runs in a browser.

In: run directories, read by `runs/reader` and `runs/index`. Out: the page in `static/`, and JSON below `/api/`.
`server` answers requests, `opened` finds the runs, `overview` has their small files, `indexes` keeps the indexes of
the runs that are looked at, `lists` and `pages` answer from them, `watcher` reports the files that change. Read
`server` first.
"""
