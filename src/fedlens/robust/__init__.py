"""Hostile clients, and what a server can do about them: defences of a round's uploads, attacks that test these."""
