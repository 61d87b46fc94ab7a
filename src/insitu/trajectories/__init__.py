"""Turns finished episodes into trajectories, grouped by row: `builder`, with the `conversations` of each episode.

`records` are episodes as lines of a run's files, and `stored` reads them again, group by group.
"""
