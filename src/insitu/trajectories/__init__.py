"""Turns finished episodes into trajectories, grouped by row. Read `builder` first."""
