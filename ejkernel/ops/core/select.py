"""Which implementation runs a call, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ejkernel.contracts.call import Call
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams
from ejkernel.contracts.registry import Choice, Implementation, kernel_registry, matches
from ejkernel.contracts.support import Backend, Platform, Request
from ejkernel.errors import UnsupportedError
from ejkernel.ops.config import chain


@dataclass(frozen=True)
class Pins:
    """What the caller insists on."""

    platform: Platform | None = None
    backend: Backend | None = None

    def refusal(self, entry: Implementation, device: DeviceInfo) -> str | None:
        """Why an implementation is not the one asked for."""
        if not matches(entry, self.platform, self.backend):
            return f"{self} was asked for"
        asked = self.backend
        if asked is not None and asked is not Backend.ANY and asked.value != device.kind:
            return f"{self} was asked for, the device is a {device.kind.upper()}"
        if asked is Backend.ANY and entry.backend is not Backend.ANY:
            return f"{self} was asked for"
        return None

    def __str__(self) -> str:
        asked = (("platform", self.platform), ("backend", self.backend))
        return ", ".join(f"{name}={pin.value!r}" for name, pin in asked if pin is not None)


@dataclass(frozen=True)
class Candidate:
    """One implementation, and what became of it: ``chosen``, ``slower`` or ``refused``."""

    implementation: Implementation
    verdict: str
    reasons: tuple[str, ...]

    @property
    def platform(self) -> Platform:
        """What the kernel is written in."""
        return self.implementation.platform

    @property
    def backend(self) -> Backend:
        """What the kernel runs on."""
        return self.implementation.backend


@dataclass(frozen=True)
class Explanation:
    """What would run a call, and why; its text is a table with one implementation a row.

    Attributes:
        call: the bound call.
        device: what it was decided for.
        chosen: the choice, None if every implementation is refused.
        candidates: every implementation.
        gradients: what a backward was decided for; empty for a forward.
        backward: the same for the backward of a forward, if that was asked for.
    """

    call: Call
    device: DeviceInfo
    pins: Pins
    chosen: Choice | None
    candidates: tuple[Candidate, ...]
    gradients: frozenset[str] = frozenset()
    backward: Explanation | None = None

    def require(self) -> Choice:
        """The choice, or the error that carries this table."""
        if self.chosen is not None:
            return self.chosen
        asked = str(self.pins)
        if not asked:
            cause = "no implementation can run this call"
        elif not any(matches(c.implementation, self.pins.platform, self.pins.backend) for c in self.candidates):
            cause = f"no implementation is registered for {asked}"
        else:
            cause = f"{asked} cannot run this call"
        raise UnsupportedError(f"{self.call.operation}: {cause}.\n{self}")

    def noting(self, notes: tuple[str, ...]) -> Explanation:
        """With more to say of what is chosen."""
        candidates = (replace(c, reasons=(*c.reasons, *notes)) if c.verdict == "chosen" else c for c in self.candidates)
        return replace(self, candidates=tuple(candidates))

    def __str__(self) -> str:
        rows = [
            (c.platform.value, c.backend.value, c.verdict, "; ".join(c.reasons))
            for c in sorted(self.candidates, key=lambda c: ("chosen", "slower", "refused").index(c.verdict))
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [
            "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        title = (
            f"gradients of {', '.join(sorted(self.gradients))}" if self.gradients else f"{self.call} on {self.device}"
        )
        table = "\n".join([title, *lines])
        return table if self.backward is None else f"{table}\n{self.backward}"


def decide(
    call: Call,
    device: DeviceInfo,
    pins: Pins,
    gradients: frozenset[str] = frozenset(),
    direction: str = "forward",
    forward: Choice | None = None,
) -> Explanation:
    """Choose: pinned, else the fastest measured, else the highest priority.

    For the backward, implementations that differentiate only as a whole are out, and the forward's own implementation
    is preferred where nothing was measured.
    """
    request = Request(device, call.dtype, call.head_dims, call.features, gradients)
    without_gradients = Request(device, call.dtype, call.head_dims, call.features)
    entries = kernel_registry.list_implementations(call.algorithm)
    refused: dict[Implementation, tuple[str, ...]] = {}
    for entry in entries:
        pin = pins.refusal(entry, device)
        alone = direction == "backward" or entry.whole
        reasons = [pin] if pin else entry.support.refusals(request if alone else without_gradients)
        if not pin:
            reasons += _unfit(entry, call, pins, gradients, direction)
        if reasons:
            refused[entry] = tuple(reasons)
    admissible = [entry for entry in entries if entry not in refused]
    records = chain.records(call, device, admissible, direction)

    # A shipped table knows the package's own kernels: it does not keep a kernel of higher priority from its turn.
    priorities = {entry: entry.priority_for(call.shapes, call.spec, device, direction) for entry in entries}
    unmeasured = max((priorities[entry] for entry in admissible if entry not in records), default=None)

    def rank(entry: Implementation) -> tuple:
        record = records.get(entry)
        if record and record.source == "shipped" and unmeasured is not None and unmeasured > priorities[entry]:
            record = None
        same = forward is not None and forward.implementation == entry
        return (record is None, record.seconds if record else 0.0, -priorities[entry], not same)

    admissible.sort(key=rank)
    if not admissible:
        chosen = None
    else:
        entry = admissible[0]
        params, source = chain.resolve(call, device, entry, direction, records.get(entry))
        chosen = Choice(entry, params, source, device)
    candidates = tuple(
        Candidate(entry, *_verdict(entry, chosen, refused, records, priorities)) for entry in [*admissible, *refused]
    )
    return Explanation(call, device, pins, chosen, candidates, gradients if direction == "backward" else frozenset())


def decide_both(call: Call, device: DeviceInfo, pins: Pins, gradients: frozenset[str]) -> Explanation:
    """The decision for a forward whose result is differentiated, and in it the one for the backward."""
    explanation = decide(call, device, pins, gradients)
    forward = explanation.chosen
    if forward is not None and forward.implementation.whole:
        backward = _by_jax(explanation, gradients)
    else:
        backward = decide(call, device, pins, gradients, "backward", forward)
    return replace(explanation, backward=backward)


def _by_jax(explanation: Explanation, gradients: frozenset[str]) -> Explanation:
    """The backward of an implementation that JAX differentiates as a whole: no other can take it."""
    assert explanation.chosen is not None
    chosen = replace(explanation.chosen, params=BwdParams())
    reasons = {"chosen": "differentiated by JAX as a whole", "slower": "the forward is differentiated as a whole"}
    verdicts = {"chosen": "chosen", "slower": "refused", "refused": "refused"}
    candidates = tuple(
        replace(c, verdict=verdicts[c.verdict], reasons=(reasons[c.verdict],) if c.verdict in reasons else c.reasons)
        for c in explanation.candidates
    )
    return replace(explanation, chosen=chosen, candidates=candidates, gradients=gradients)


def _unfit(entry: Implementation, call: Call, pins: Pins, gradients: frozenset[str], direction: str) -> list[str]:
    """Reasons that lie in how an implementation is differentiated."""
    if entry.whole and direction == "backward":
        return ["is differentiated only as a whole"]
    reasons = []
    if entry.whole and call.runs_on:
        reasons.append(f"has no forward and backward of its own, which {call.operation} is made of")
    differentiates = direction == "backward" or (entry.whole and gradients)
    accepted = entry.support.deterministic or pins.platform is entry.platform or chain.nondeterminism_allowed()
    if differentiates and not accepted:
        named = f"platform={entry.platform.value!r} or EJKERNEL_NONDETERMINISTIC=1"
        reasons.append(f"its gradients differ from run to run in their last bits ({named} accepts that)")
    return reasons


def _verdict(
    entry: Implementation, chosen: Choice | None, refused: dict, records: dict, priorities: dict
) -> tuple[str, tuple[str, ...]]:
    if entry in refused:
        return "refused", refused[entry]
    assert chosen is not None
    best = chosen.implementation
    if entry == best:
        given = ", ".join(f"{name}={value}" for name, value in chosen.params.to_dict().items())
        predicted = " (predicted)" if best in records and records[best].predicted else ""
        return "chosen", (f"{chosen.source}{predicted}: {given}" if given else f"{chosen.source}{predicted}",)
    if entry in records and best in records:
        how = "predicted" if records[best].predicted else "measured"
        return "slower", (f"{records[entry].seconds / records[best].seconds:.2g} x, {how}",)
    if best in records and not records[best].predicted:
        return "slower", ("not measured, another is",)
    if priorities[entry] == priorities[best]:
        return "slower", (f"priority {priorities[entry]} too, registered later",)
    return "slower", (f"priority {priorities[entry]} < {priorities[best]}",)
