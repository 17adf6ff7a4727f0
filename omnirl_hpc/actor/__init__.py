"""The policy being trained."""
