"""Bytes that the runtime keeps between and during requests."""
