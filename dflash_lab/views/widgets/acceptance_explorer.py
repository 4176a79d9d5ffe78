"""Compare definitions of acceptance on the same cycles, by prompt set.

Leaves out: figures (`views/acceptance.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_lab.speculative.trace import DecodeTrace
from dflash_lab.views.acceptance import RATES, acceptance_view
from dflash_lab.views.view import View
from dflash_lab.views.widgets.shell import choice, shell


def acceptance_explorer(traces: Mapping[str, Sequence[DecodeTrace]]):
    """A choice of the prompt set, and a tick for each definition.

    Args:
        traces: name of the set to traces of one block size.
    """
    from ipywidgets import Checkbox

    pooled = [trace for part in traces.values() for trace in part]
    sets = {"all": pooled, **traces}
    controls = {"prompts": choice(list(sets), "prompts")}
    for rate in RATES:
        layout = {"width": "auto"}
        controls[rate] = Checkbox(True, description=rate, indent=False, layout=layout)

    def show(prompts: str, **ticked: bool) -> View:
        chosen = [rate for rate in RATES if ticked[rate]] or ["survival"]
        return acceptance_view(sets[prompts], chosen)

    return shell(controls, show)
