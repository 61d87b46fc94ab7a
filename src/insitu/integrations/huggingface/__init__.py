"""Rows from the Hugging Face Hub, and uploads of checkpoints to it while a run goes on."""
