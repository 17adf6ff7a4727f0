"""What a run measures and writes down."""
