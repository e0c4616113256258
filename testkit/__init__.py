"""What tests and proofs share: tiny models, runs, a simulated accelerator, oracles, faults."""

import os

# No run of a test or a proof measures the machine by itself: megatrain/cli/measuring.py.
os.environ.setdefault("MEGATRAIN_MEASURE", "0")
