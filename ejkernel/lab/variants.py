"""Other ways to run a call than the one that is selected: what can be timed beside it, and what to do if one is faster."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from ejkernel import BwdParams, FwdParams, overlay
from ejkernel.lab.workloads import Workload
from ejkernel.ops.config.autotune import proposals

OURS = "ejkernel"


class Variant(NamedTuple):
    """A platform's kernel with parameters of the forward or of the backward."""

    platform: str
    params: FwdParams | BwdParams
    algorithm: str

    def __str__(self) -> str:
        direction = "" if isinstance(self.params, FwdParams) else ", backward"
        return f"{OURS} {self.platform}{direction}: {', '.join(f'{n}={v}' for n, v in self.params.to_dict().items())}"

    def used(self) -> contextlib.AbstractContextManager[None]:
        """Its parameters, for what is traced in the block."""
        return overlay(**{self.algorithm: self.params})


def decided(workload: Workload, dtype: str, backward: bool) -> Any:
    """What would run it."""
    return workload.explained(dtype, gradients=workload.differentiable if backward else ())


def chosen(decision: Any) -> dict[str, Any]:
    """Which kernels a decision chose, with which parameters, and where those are from; by direction."""
    found = {"forward": decision.chosen, "backward": decision.backward and decision.backward.chosen}
    return {
        direction: {"platform": c.platform.value, "source": c.source, "params": c.params.to_dict()}
        for direction, c in found.items()
        if c is not None
    }


def words(choices: dict[str, Any]) -> str:
    """Chosen kernels as one reads them."""
    parts = [
        f"{c['platform']} ({', '.join([c['source'], *(f'{n}={v}' for n, v in c['params'].items())])})"
        for c in choices.values()
    ]
    return parts[0] if len(set(parts)) == 1 else f"{parts[0]}, backward {parts[1]}"


def platforms(decision: Any) -> list[str]:
    """The platforms that selection could have chosen, for the backward too if it decided one."""
    able = [c.platform.value for c in decision.candidates if c.verdict != "refused"]
    if decision.backward is not None:
        also = {c.platform.value for c in decision.backward.candidates if c.verdict != "refused"}
        able = [platform for platform in able if platform in also]
    return able


def variants(decision: Any) -> list[Variant]:
    """Every parameter set that the kernels propose, of the backward if the decision has one; not the one that was chosen."""
    call, direction = decision.call, "forward"
    able = platforms(decision)
    if decision.backward is not None:
        decision, direction = decision.backward, "backward"
    if not call.shapes or call.runs_on or decision.chosen is None:
        return []
    taken = decision.chosen.implementation, decision.chosen.params
    return [
        Variant(c.platform.value, params, call.algorithm)
        for c in decision.candidates
        if c.verdict != "refused" and c.platform.value in able and not c.implementation.plain
        for params in proposals(call, decision.device, c.implementation, direction)
        if (c.implementation, params) != taken and params.to_dict()
    ]


def advice(row: dict[str, Any]) -> str:
    """What to say of a row that something of ours is faster than; nothing if nothing is."""
    faster = row.get("faster")
    if not faster:
        return ""
    return (
        f"{row['name']}, {row['what']}: {words(row['chosen'])} was chosen and takes {faster['ours_ms']:.3g} ms; "
        f"{faster['implementation'].removeprefix(OURS).strip()} takes {faster['ms']:.3g} ms, {faster['ratio']:.2f} × as "
        f"fast. To measure here and keep the fastest: ejkernel tune {faster['tune']}"
    )
