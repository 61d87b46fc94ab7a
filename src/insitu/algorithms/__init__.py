"""Pure functions without I/O or torch: selection, shapes of rewards, statistics, budgets of episodes and memory."""
