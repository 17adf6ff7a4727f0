"""RL algorithms: one file each, pure functions on tensors. They know no model, no engine and no process
group.
"""

from omnirl_hpc.algorithms.algorithm import Algorithm, LikelihoodAlgorithm
from omnirl_hpc.algorithms.flow_grpo import FlowGRPO
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config

__all__ = ["Algorithm", "FlowGRPO", "LikelihoodAlgorithm", "make_algorithm"]


def make_algorithm(config: Config) -> Algorithm:
    """The one that the settings name. Raises ConfigError where they do not fit it."""
    return find_class("algorithm", config.algorithm.name)(config)
