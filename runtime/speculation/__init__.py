"""Speculation: drafts of several tokens, verified by the model in one pass."""
