"""The command line: one module a command; what a library user would miss is in `spec_local`."""
