"""What is computed: a Hugging Face decoder, read with suspicion and cut into blocks."""
