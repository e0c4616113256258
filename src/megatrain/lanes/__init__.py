"""Lanes: the threads and streams that play a schedule."""
