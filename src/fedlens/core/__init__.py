"""Trees, networks, hooks and the round loop. Imports nothing from the rest of the package."""
