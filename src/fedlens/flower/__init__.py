"""Real federations: the same experiment over Flower's SuperLink and SuperNodes."""
