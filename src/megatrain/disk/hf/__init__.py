"""Model folders in Hugging Face form: read, checked, written."""
