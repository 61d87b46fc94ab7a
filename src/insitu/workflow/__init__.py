"""What runs a user's workflow: functions, their context and steps, the models they call, and capture of those calls."""
