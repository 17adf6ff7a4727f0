"""What a run must remember: saved and found whole or not at all."""
