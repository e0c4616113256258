"""Steps: from documents to the micro-batches of a step."""
