"""Devices: where compute happens and how bytes get there."""
