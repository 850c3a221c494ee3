"""The FUSE room: the only one that knows pyfuse3. Translates requests into core and engine calls."""
