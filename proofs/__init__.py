"""Proofs that take minutes to hours: crashes, races, signals, parity. Each is a command."""
