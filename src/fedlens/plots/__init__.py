"""One look for all figures: colours, sizes, saving."""
