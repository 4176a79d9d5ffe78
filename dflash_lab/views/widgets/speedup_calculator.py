"""Turn the knobs of the cost model and see when drafting pays.

Leaves out: the model (`measure/speedup.py`) and its picture (`views/speedup.py`).
"""

from __future__ import annotations

from dflash_lab.measure.speedup import Costs
from dflash_lab.views.speedup import calculator_view
from dflash_lab.views.widgets.shell import shell


def speedup_calculator(costs: Costs | None = None, tau: float = 3.0):
    """Sliders for acceptance length, block size and costs in plain tokens.

    Args:
        costs: where the sliders start, such as measured ones; a typical GPU if None.
        tau: where that of the acceptance length starts.
    """
    from ipywidgets import FloatSlider, IntSlider

    costs = costs or Costs(16, 1.0, 0.15, 1.1, 0.05)

    def share(milliseconds: float, high: float, name: str) -> FloatSlider:
        value = min(milliseconds / costs.plain_ms, high)
        return FloatSlider(value=value, min=0, max=high, step=0.01, description=name)

    controls = {
        "tau": FloatSlider(value=tau, min=1, max=16, step=0.1, description="tau"),
        "block_size": IntSlider(costs.block_size, 2, 16, description="block size"),
        "draft": share(costs.draft_ms, 2, "draft"),
        "verify": share(costs.verify_ms, 6, "verify"),
        "other": share(costs.other_ms, 1, "other"),
    }
    return shell(controls, calculator_view)
