"""A long run with a day's faults: nothing is lost, every bit is right, memory stays flat."""
