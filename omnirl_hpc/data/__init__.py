"""Prompt tables, and the sampler that makes groups of them."""
