"""The memory of a run from sizes alone: its ledger before anything exists."""
