"""A desk that drafts answers, picks the best one, and can look things up."""
