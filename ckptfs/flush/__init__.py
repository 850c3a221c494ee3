"""Flush: the worker processes that carry bytes to the tier, and what main says to them."""
