"""Methods on the same data and splits: what is run, what is read, what is said."""
