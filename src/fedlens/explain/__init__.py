"""What models look at: saliency, attention and relevance maps of runs."""
