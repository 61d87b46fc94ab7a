"""Two players add 1, 2 or 3 in turn; who reaches ten wins."""
