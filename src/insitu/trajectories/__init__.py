"""Turns finished episodes into trajectories, grouped by row: `builder`, with the `conversations` of each episode."""
