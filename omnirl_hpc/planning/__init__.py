"""What a run needs and how long it takes, by arithmetic from its settings: no GPU, no weights, no torch."""
