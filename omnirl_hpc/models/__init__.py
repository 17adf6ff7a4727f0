"""Model families: one folder each. A family says what the actor runs, what the engine runs, where LoRA goes,
and which checkpoints it can train (spec.py, without torch).
"""
