"""Task folders of Harbor, each run in a container of the user's command.

In goes a folder of tasks, each a row with its instruction; the agent works in the task's container and calls the model
through the gateway, and the task's `tests/test.sh` judges what it leaves there; out comes an `Outcome` with the rewards
that the tests have written. Read `tasks` first (what a task is, and its row), then `workflow` (an episode).
"""
