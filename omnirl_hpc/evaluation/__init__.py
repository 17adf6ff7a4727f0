"""Policies side by side on fixed prompts."""
