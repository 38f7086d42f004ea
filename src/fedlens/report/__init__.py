"""Pictures and tables made from runs."""
