"""RL post-training for diffusion and omni models as one SPMD program under Slurm."""

__version__ = "0.1.0"
