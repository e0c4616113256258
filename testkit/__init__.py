"""What tests and proofs share: tiny models, runs, a simulated accelerator, oracles, faults."""
