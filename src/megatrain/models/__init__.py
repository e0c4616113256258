"""Models: a Hugging Face decoder from a strictly checked config, split into blocks."""
