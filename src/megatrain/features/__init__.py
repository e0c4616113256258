"""What a step can do beyond a plain one: a folder per feature.

A feature is a class with all that a step knows about it (engine/features.py). registry.py is the
only file outside of a folder that names it, but for its setting and its key. A feature that is off
is not imported.
"""
