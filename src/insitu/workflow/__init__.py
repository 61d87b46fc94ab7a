"""Runs a user's workflow: its functions, the models they call, and the context and steps of an episode."""
