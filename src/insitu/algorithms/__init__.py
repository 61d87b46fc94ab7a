"""Pure functions without I/O or torch: the curriculum, statistics, and names of files."""
