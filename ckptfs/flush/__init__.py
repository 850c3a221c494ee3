"""Flush: the worker processes that carry bytes to the tier, and the loop that publishes in order."""
