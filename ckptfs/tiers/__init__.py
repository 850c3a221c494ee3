"""Tiers: where checkpoints live for good. Run in worker processes only."""
