"""Accuracy packs: what the fp32 graphs gave for small inputs, kept in the bundle and held against its engines."""
