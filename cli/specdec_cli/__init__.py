"""The command line, one module per command. Everything that a library user needs is in `spec_local`."""
