"""ckptfs: a checkpoint file system that absorbs at memory speed and publishes to a tier in order."""

__version__ = "0.1.0"
