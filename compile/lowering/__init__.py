"""Rules that turn canonical graphs into what a target runs best."""

from .target import KV, MIN_WIDTH, OPTIONS, PRECISIONS, lower, seams

__all__ = ["KV", "MIN_WIDTH", "OPTIONS", "PRECISIONS", "lower", "seams"]
