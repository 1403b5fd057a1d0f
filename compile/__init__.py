"""The compiler: checkpoint → canonical graphs → engines → checks → bundle."""
