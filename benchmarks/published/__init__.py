"""Speeds that others have published, and what the simulator gives for the same machines and steps.

    points.toml    each figure with its source, as it was published
    points.py      a figure as data
    systems.py     each system's schedule, from its own text or program, with the reason
    playing.py     a step of a system on the simulator's clock
    claims.py      what others say fits, asked of the planner
    trial.py       predicted against published

`python -m benchmarks.published` prints the table of docs/planner.md.
"""
