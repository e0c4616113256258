"""Experts that visit the device in pages while their layer computes."""
