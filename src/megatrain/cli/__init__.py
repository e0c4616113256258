"""The command line: one function per verb."""
