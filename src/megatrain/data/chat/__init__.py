"""Chat: from messages to text, and which of it is trained."""
