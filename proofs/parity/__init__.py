"""The same rows through TRL's SFTTrainer and through MegaTrain: tokens, losses, steps."""
