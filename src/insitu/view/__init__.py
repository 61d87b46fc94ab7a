"""Shows runs in a browser: reads the files of a run directory, never writes them.

`server` answers requests: the page in `static/`, and JSON below `/api/`. `opened` finds the runs, `overview` reads the
small files of a run, `index` holds where the groups and episodes of a run are, `lists` and `pages` answer from it.
`watcher` reports the files that change. Read `server` first.
"""
