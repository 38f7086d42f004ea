"""`fedlens ui`: a live page over a folder of runs."""
