"""One script per rival, run by the rival's own interpreter; serving.py is what they share."""
