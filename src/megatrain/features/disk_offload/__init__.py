"""Masters and moments are on disk between updates."""
