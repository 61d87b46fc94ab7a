"""Pure functions without I/O or torch: the curriculum, and statistics."""
