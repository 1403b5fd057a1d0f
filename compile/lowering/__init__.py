"""Rules that turn canonical graphs into what a target runs best."""
