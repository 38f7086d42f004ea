"""Run an experiment on this machine, or go on where a run stopped."""
