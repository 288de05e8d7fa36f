"""What the device's runner reads once for several sequences, noted while it runs."""

from __future__ import annotations

from sgray.engine.engine import Engine
from sgray.engine.plan import StepPlan
from sgray.kernels.span_attention.sharing import SharedUnits


def record_shared(engine: Engine) -> list[list[tuple[int, int, int, int]]]:
    """The units of each step that has some, as they are uploaded from now on."""
    found: list[list[tuple[int, int, int, int]]] = []
    state = engine._executor._state
    upload = state.upload

    def recorded(plan: StepPlan, shared: SharedUnits) -> None:
        if shared.units:
            found.append(shared.units)
        upload(plan, shared)

    state.upload = recorded
    return found
