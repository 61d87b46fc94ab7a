"""The components of the extending guide, written out, and an agent for them to train."""
