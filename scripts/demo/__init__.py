"""The demonstration model: synthetic tasks, training from scratch, scores on held-out seeds."""
