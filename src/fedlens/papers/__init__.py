"""Papers' tables and figures: what `fedlens reproduce` knows."""
