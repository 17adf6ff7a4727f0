"""RL algorithms: one file each, pure functions on tensors. They know no model, no engine and no process
group.
"""

from omnirl_hpc.algorithms.algorithm import Algorithm
from omnirl_hpc.algorithms.flow_grpo import FlowGRPO

__all__ = ["Algorithm", "FlowGRPO"]
