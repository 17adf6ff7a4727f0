"""Who am I among the ranks, and how do they reach each other."""
