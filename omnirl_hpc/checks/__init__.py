"""What is checked before weights load: settings, the node, the tables, the model, the ranks together."""
