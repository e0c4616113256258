"""Preference losses against TRL's own trainers."""
