"""Building TensorRT engines: what is checked before, how a graph becomes an engine, what is known of it."""
