"""Measuring how long calls of a model take on this machine, and keeping the results."""
