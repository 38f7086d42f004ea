"""Methods on equal terms over many worlds: the same images trained, tuned rates, ranks with their uncertainty."""
