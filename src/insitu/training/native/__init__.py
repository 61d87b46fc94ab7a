"""`insitu backend`: started as a child process, or reached at a URL; trains through its native protocol."""
