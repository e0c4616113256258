"""Code that runs in vLLM's processes: this folder is on their path, and none of it knows us."""
