"""The HTTP interfaces of other programs: their bodies, their errors, and their streams."""
