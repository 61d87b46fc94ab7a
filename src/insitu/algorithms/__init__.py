"""Pure functions without I/O or torch, needed by the loop and by the backend alike."""
