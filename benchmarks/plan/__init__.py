"""The plan against what happens: memory, limits, time, and choice. `python -m benchmarks.plan`."""
