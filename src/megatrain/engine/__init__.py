"""When bytes move: a step as a list of ops, and those who play it."""
