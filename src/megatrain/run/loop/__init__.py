"""What happens around the steps of a run: rollbacks, and Ctrl-C in a program."""
