"""TRL's trainers, as they are and streamed."""
