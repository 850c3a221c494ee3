"""Staging: the files that hold bytes until they are durable, and afterwards as clean cache."""

from ckptfs.staging.area import Area
from ckptfs.staging.blob import EXTENT, Blob
from ckptfs.staging.store import Staging

__all__ = ["EXTENT", "Area", "Blob", "Staging"]
