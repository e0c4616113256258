"""What outlives us: model folders in, model folders out."""
