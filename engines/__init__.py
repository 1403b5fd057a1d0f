"""Engines, targets and bundles: what the runtime runs and what the compiler writes."""
