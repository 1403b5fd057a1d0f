"""Pixels and token ids, equal to what each family's transformers processor gives."""
