"""Rules that turn canonical graphs into what a target runs best."""

from .target import MIN_WIDTH, OPTIONS, PRECISIONS, lower, seams

__all__ = ["MIN_WIDTH", "OPTIONS", "PRECISIONS", "lower", "seams"]
