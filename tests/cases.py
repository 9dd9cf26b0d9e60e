"""Calls of flash_attention that exercise features, alone and together, made from the operation's own list."""

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from subjects import parameter, subjects

from ejkernel import BwdParams, FwdParams

# Blocks much smaller than the arrays, of odd sizes, so that every loop, tail and boundary is passed.
SMALL_BLOCKS = {
    "fwd_params": FwdParams(q_blocksize=16, kv_blocksize=24, blocksize_heads=1),
    "bwd_params": BwdParams(q_blocksize=24, kv_blocksize=16),
}
# The same for kernels whose tiles have at least 64 rows, with lengths that are as much longer.
WIDE_BLOCKS = {"fwd_params": FwdParams(q_blocksize=128, kv_blocksize=48, num_warps=8, num_stages=2)}
STRETCH = 4


@dataclass(frozen=True)
class Case:
    """A size and a set of features; one that ``shrinks`` leaves out what an implementation does not have."""

    name: str
    features: frozenset[str] = frozenset()
    batch: int = 2
    q_len: int = 37
    kv_len: int = 37
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 16
    value_dim: int = 16
    window: tuple | int | None = (9, 3)
    variant: int = 0
    blocks: dict = field(default_factory=lambda: SMALL_BLOCKS)
    shrinks: bool = False

    def __str__(self):
        return self.name

    @property
    def needs(self):
        """Every feature that the call uses, those included that are in its sizes."""
        sizes = {
            "gqa": self.group > 1,
            "value_dim": self.value_dim != self.head_dim,
            "cross": self.q_len != self.kv_len,
        }
        return self.features.union(name for name, used in sizes.items() if used)

    def at(self, subject):
        """The case in head dims that an implementation takes; None if it lacks a feature that the case is about."""
        case = self.shrunk(subject) if self.shrinks else self
        step = subject.step
        if step > 1:
            dims, of_step = (case.head_dim, case.value_dim), subject.support.head_dims.step
            # In proportion, so that dims which differ still do, and odd ones are the odd multiples that it takes.
            odd = of_step < step and case.head_dim % 2
            head_dim, value_dim = (of_step * dim if odd else max(8, step) * -(-dim // 8) for dim in dims)
            case = replace(case, head_dim=head_dim, value_dim=value_dim)
        if step > 8:
            lengths = {name: STRETCH * getattr(case, name) for name in ("q_len", "kv_len") if getattr(case, name) > 1}
            case = replace(case, **lengths, blocks=WIDE_BLOCKS)
        if subject.in_pallas_interpreter and not case.shrinks:
            case = replace(case, batch=1)
        return case if subject.has(*case.needs) else None

    def shrunk(self, subject):
        """With the features that an implementation has together, added one by one."""
        kept = []
        for feature in ("causal", *sorted(self.needs - {"causal"})):
            if feature in self.needs and subject.has(*kept, feature):
                kept.append(feature)
        sizes = {
            "gqa": {"group": 1},
            "value_dim": {"value_dim": self.head_dim},
            "cross": {"kv_len": self.q_len},
        }
        changes = [change for feature, change in sizes.items() if feature not in kept]
        return replace(self, features=self.features.intersection(kept), **{k: v for c in changes for k, v in c.items()})

    def make(self, dtype="float32", seed=0):
        """``(arrays, statics)``: keyword arguments that differentiate or trace, and those that do not."""
        rng = np.random.default_rng(seed)
        f = self.features
        heads = self.kv_heads * self.group
        batch = 1 if "varlen" in f else self.batch

        def normal(*shape, dtype=dtype):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        arrays = {
            "query": normal(batch, self.q_len, heads, self.head_dim),
            "key": normal(batch, self.kv_len, self.kv_heads, self.head_dim),
            "value": normal(batch, self.kv_len, self.kv_heads, self.value_dim),
        }
        statics = {}
        full = (batch, heads, self.q_len, self.kv_len)
        if "causal" in f:
            statics["causal"] = True
        if "window" in f:
            statics["sliding_window"] = self.window
        if "soft_cap" in f:
            statics["logits_soft_cap"] = 1.5
        if "bias" in f:
            shapes = [full, full[1:], full[2:], (batch, 1, self.q_len, 1), (1, heads, 1, self.kv_len), (1, 1, 1, 1)]
            shape = shapes[self.variant % len(shapes)]
            bias = rng.standard_normal(shape)
            if self.variant % 2 == 0:
                bias[rng.random(shape) < 0.1] = -np.inf
            arrays["bias"] = jnp.asarray(bias, "float64" if dtype == "float64" else "float32")
        if "mask" in f:
            shapes = [
                full,
                (batch, self.kv_len),
                (batch, self.q_len, self.kv_len),
                (1, heads, self.q_len, self.kv_len),
                (batch, 1, 1, self.kv_len),
                (1, self.q_len, self.kv_len),
                (batch, 1, self.kv_len),
                (1, self.kv_len),
            ]
            mask = rng.random(shapes[self.variant % len(shapes)]) < 0.6
            arrays["attention_mask"] = jnp.asarray(mask if self.variant % 2 == 0 else mask.astype(np.int32) * 3)
        if "segments" in f:
            ids = [np.sort(rng.integers(0, 5, (batch, n)), -1) for n in (self.q_len, self.kv_len)]
            if self.variant % 2:
                ids = [rng.permuted(x - 1, axis=-1) for x in ids]
            arrays["q_segment_ids"], arrays["kv_segment_ids"] = (jnp.asarray(x, jnp.int32) for x in ids)
        if "varlen" in f:
            for name, n in (("cum_seqlens_q", self.q_len), ("cum_seqlens_k", self.kv_len)):
                cuts = np.sort(rng.integers(0, n + 1, 4))
                arrays[name] = jnp.asarray([0, cuts[0], cuts[1], cuts[1], cuts[2], cuts[3]], jnp.int32)
        if "sinks" in f:
            shared = (1, 2) if heads == 2 else (2,)  # one dimension as long as there are heads is refused
            shape = (heads, 3) if self.variant % 2 else shared
            arrays["softmax_aux"] = normal(*shape, dtype="float64" if dtype == "float64" else "float32")
        if "dropout" in f:
            statics |= {"dropout_prob": 0.3}
            arrays["dropout_seed"] = jnp.int32(-7 - self.variant)
        if "lse" in f:
            statics["return_lse"] = True
        return arrays, statics

    def as_oracle(self, arrays, statics):
        """Keyword arguments of ``oracle.attention``."""
        known = {k: v for k, v in statics.items() if k not in ("return_lse", "fwd_params", "bwd_params")}
        known |= {k: np.asarray(v) for k, v in arrays.items()}
        if "dropout_seed" in known:
            known["dropout_seed"] = int(known["dropout_seed"])
        return known


_SIZES = {"gqa": {"group": 3}, "value_dim": {"value_dim": 8}, "cross": {"q_len": 29, "kv_len": 45}}


def single_feature_cases(features):
    """One case without any feature, and one for each."""
    cases = [Case("plain")]
    for name in sorted(features):
        cases.append(Case(name, frozenset({name}), **_SIZES.get(name, {})))
    return cases


COMBINED = [
    Case("causal_cross_short_keys", frozenset({"causal"}), q_len=45, kv_len=29),
    Case("causal_cross_long_keys", frozenset({"causal"}), q_len=29, kv_len=45),
    Case("one_query", frozenset({"causal", "lse"}), q_len=1, kv_len=50, group=4),
    Case("one_key", frozenset({"lse"}), q_len=20, kv_len=1),
    Case("one_of_each", q_len=1, kv_len=1, batch=1, kv_heads=1, head_dim=1, value_dim=1),
    Case("left_window", frozenset({"window"}), window=(5, None)),
    Case("right_window", frozenset({"window"}), window=(None, 4)),
    Case("zero_window", frozenset({"window", "lse"}), window=0),
    Case("int_window_causal", frozenset({"window", "causal"}), window=7),
    Case("window_past_the_keys", frozenset({"window", "lse"}), window=(2, 0), q_len=40, kv_len=11),
    Case("wide_window", frozenset({"window", "causal"}), window=(30, 0), q_len=90, kv_len=90),
    Case("mqa_causal", frozenset({"causal"}), kv_heads=1, group=4),
    Case("odd_dims", frozenset({"causal"}), head_dim=7, value_dim=5),
    *[Case(f"bias_{i}", frozenset({"bias", "lse"}), variant=i) for i in range(6)],
    *[Case(f"mask_{i}", frozenset({"mask", "lse"}), variant=i, group=2) for i in range(8)],
    Case("shuffled_segments", frozenset({"segments", "causal"}), variant=1),
    Case("segments_long", frozenset({"segments", "causal"}), q_len=130, kv_len=130),
    Case("varlen_causal_window", frozenset({"varlen", "causal", "window"}), q_len=61, kv_len=61, window=(6, 0)),
    Case("varlen_cross", frozenset({"varlen", "causal", "lse"}), q_len=61, kv_len=83, group=2),
    Case("varlen_segments", frozenset({"varlen", "segments"}), q_len=61, kv_len=61),
    Case("sinks_by_head", frozenset({"sinks", "causal", "window", "lse"}), variant=1, group=2),
    Case("sinks_and_nothing_to_see", frozenset({"sinks", "window", "lse"}), window=(1, 0), q_len=40, kv_len=11),
    Case("gemma", frozenset({"soft_cap", "causal", "window", "segments"}), group=2),
    Case("everything", frozenset({"causal", "window", "soft_cap", "bias", "mask", "segments", "sinks", "dropout", "lse"}),
         group=2, value_dim=24, q_len=41, kv_len=53, window=(17, 2), shrinks=True),
    Case("everything_packed", frozenset({"causal", "window", "soft_cap", "bias", "mask", "varlen", "segments", "sinks",
                                          "dropout", "lse"}), group=2, value_dim=8, q_len=60, kv_len=71, variant=1,
         shrinks=True),
]  # fmt: skip


def named(*names):
    """Some of the cases above."""
    found = {case.name: case for case in (Case("plain"), *COMBINED)}
    return [found[name] for name in names]


def taken(cases, dtypes="main"):
    """Pairs of an implementation and a case that it takes, in its sizes."""
    pairs = [(subject, case.at(subject)) for case in cases for subject in subjects(dtypes=dtypes)]
    return [(subject, case) for subject, case in pairs if case is not None]


def each_case(cases, *, dtypes="main", short=(), compiled=None, again=lambda subject, case: False):
    """Parameters ``subject, case`` of a test.

    ``short``: the names of the cases that interpreters run in ``make test``; ``compiled``: of those that other kernels run
    there, all if None; ``again``: which interpreters run in ``make test-full`` alone.
    """

    def slow(subject, case):
        kept = short if subject.interpreted else compiled
        return kept is not None and case.name not in kept

    return pytest.mark.parametrize(
        ("subject", "case"),
        [
            parameter(subject, case, slow=slow(subject, case), again=again(subject, case))
            for subject, case in taken(cases, dtypes)
        ],
    )


@st.composite
def any_case(draw, features):
    """Any of the features together, any sizes, any blocks."""
    sizes = {"gqa", "value_dim", "cross", "lse"}  # drawn as sizes, and the lse is always looked at
    length = st.integers(1, 70)
    q_len = draw(length)
    side = st.none() | st.integers(0, 80)
    block = st.sampled_from([7, 16, 33, 64, 128])
    dim = st.sampled_from([1, 8, 20])
    return Case(
        "drawn",
        draw(st.sets(st.sampled_from(sorted(set(features) - sizes))).map(frozenset)),
        batch=draw(st.integers(1, 3)),
        q_len=q_len,
        kv_len=draw(st.just(q_len) | length),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        head_dim=draw(dim),
        value_dim=draw(dim),
        window=draw(st.tuples(side, side)),
        variant=draw(st.integers(0, 5)),
        blocks={
            "fwd_params": FwdParams(q_blocksize=draw(block), kv_blocksize=draw(block)),
            "bwd_params": BwdParams(q_blocksize=draw(block), kv_blocksize=draw(block)),
        },
        shrinks=True,
    )
