"""Attacks on what a server really receives: a transcript and stated knowledge in, a verdict out."""
