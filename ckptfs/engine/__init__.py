"""The engine: the one process that decides. Absorb, admission, the merged view, flush and publishing."""
