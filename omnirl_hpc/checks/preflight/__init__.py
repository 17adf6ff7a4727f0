"""What can go wrong on the nodes, found in seconds: before weights are loaded, or by hand with `omnirl-hpc
doctor`.
"""
