"""Side by side with what people use today: the same model, tokens and AdamW, in turns."""
