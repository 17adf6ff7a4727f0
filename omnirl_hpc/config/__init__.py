"""Typed settings, how they are composed from files and the command line, and the rules between them."""
