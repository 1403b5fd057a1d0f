"""Attention over a cache whose keys and values are int8, in four forms that are held together by one test."""
