"""Rollouts: answers drawn by the engine that trains, or by a vLLM server."""
