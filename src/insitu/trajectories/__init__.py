"""Episodes -> trajectories -> groups -> training rows."""
