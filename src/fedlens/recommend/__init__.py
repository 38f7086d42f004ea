"""Which method to try first, from evidence."""
