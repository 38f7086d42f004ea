"""Clients' devices, and simulated seconds on them."""
