"""What a run did, as one page to look at and to send."""
