"""Rows from the Hugging Face Hub."""
