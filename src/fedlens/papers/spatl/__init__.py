"""SPATL's tables and figures."""
