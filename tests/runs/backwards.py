"""An algorithm that learns what it should not."""

from __future__ import annotations

from omnirl_hpc.algorithms import FlowGRPO


class Backwards(FlowGRPO):
    """Advantages with the sign turned around: what scored well becomes less likely."""

    def advantages(self, *arguments, **named):
        return -super().advantages(*arguments, **named)
