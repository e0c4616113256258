from __future__ import annotations

from hypothesis import settings

# Machines are shared: how long one example takes says nothing.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
