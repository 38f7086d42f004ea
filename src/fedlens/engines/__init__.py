"""Where client hooks run, and how many at a time."""
