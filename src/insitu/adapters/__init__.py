"""Trainer adapters: how trajectories reach something that trains."""
