"""Work on a request before it is complete: images as they arrive, text as it is typed."""
