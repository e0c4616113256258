"""One run on several ranks: what they do in turn, agree on, and ask of each other."""
