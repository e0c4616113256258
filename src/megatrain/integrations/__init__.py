"""Other libraries' trainers, with the engine under them. None of them is a dependency."""
