"""Training while the server is idle."""
