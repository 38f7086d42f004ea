"""Mechanisms, what they cost, and what is said about them in privacy.json."""
