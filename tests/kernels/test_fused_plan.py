"""The constants of the fused kernel: they fit the GPU, agree with the source, and keep a row's bits in any batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq_cli.bench.geometry import KNOWN, Geometry
from runtime.errors import InputError, KernelError, ShapeError
from runtime.kernels.catalog import A100, CATALOG, CONSUMER, H200
from runtime.kernels.compile import Source, compile_cubin
from runtime.kernels.fused import plan as choose
from runtime.kernels.fused_config import MAX_STAGES, FusedConfig
from runtime.kernels.fused_plan import COLUMNS, MAX_TOKENS, FusedPlan, plan
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from tests.kernels.host import preprocessed

LIMITS = {name: gpu.smem_per_block_bytes for name, gpu in (("H200", H200), ("A100", A100), ("99 KiB", CONSUMER))}
FORMS = [WeightForm("int4", 32), WeightForm("int4", 64), WeightForm("int4"), WeightForm("int8", -1), WeightForm("bf16")]
ORDER_OF_SUMS = ("WARPS", "TEAM", "PARTS")
QWEN = SlotLayout(ExpertShape(60, 4, 2048, 1408), WeightForm("int4"))


def values(chosen: FusedPlan) -> dict[str, Any]:
    return dict(chosen.source.defines)


@st.composite
def shapes(draw: st.DrawFn) -> ExpertShape:
    experts = draw(st.one_of(st.integers(1, 1024), st.sampled_from([1, 3, 8, 60, 128, 257])))
    top_k = draw(st.one_of(st.integers(1, min(experts, 10)), st.integers(1, experts)))
    hidden, inner = (8 * draw(st.one_of(st.integers(1, 40), st.integers(1, 900))) for _ in range(2))
    return ExpertShape(experts, top_k, hidden, inner, draw(st.sampled_from(Activation)), draw(st.booleans()))


forms = st.one_of(
    st.builds(WeightForm, st.sampled_from(["int4", "int8"]), st.sampled_from([-1, 32, 64, 96, 128, 256])),
    st.just(WeightForm("bf16")),
)
configs = st.builds(
    FusedConfig,
    block_dim=st.sampled_from([0, 0, 64, 128, 256, 512, 1024]),
    experts_per_block=st.sampled_from([0, 1, 8]),
    stages=st.sampled_from([0, 0, 2, 3, 8, MAX_STAGES]),
    k_split=st.sampled_from([0, 1, 2, 8, 32]),
    team=st.sampled_from([0, 1, 2, 4, 16, 32]),
)


@pytest.mark.parametrize("limit_bytes", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("geometry", KNOWN.values(), ids=KNOWN)
def test_known_layers_fit_with_16_tokens_a_launch(geometry: Geometry, form: WeightForm, limit_bytes: int) -> None:
    layout = SlotLayout(geometry.shape, form)
    few, many = (plan(layout, tokens, FusedConfig(), limit_bytes) for tokens in (COLUMNS, MAX_TOKENS))
    assert (few.max_tokens, many.max_tokens) == (COLUMNS, MAX_TOKENS)
    for chosen in (few, many):
        assert chosen.smem_bytes <= limit_bytes and 2 <= values(chosen)["STAGES"] <= 8
        assert chosen.threads == 512 or (chosen.threads == 256 and limit_bytes == LIMITS["99 KiB"])


@given(shapes(), forms, configs, st.sampled_from(list(LIMITS.values())))
@settings(max_examples=300, deadline=None)
def test_the_order_of_sums_does_not_depend_on_the_number_of_tokens(
    shape: ExpertShape, form: WeightForm, config: FusedConfig, limit_bytes: int
) -> None:
    layout = SlotLayout(shape, form)
    try:
        plans = [plan(layout, tokens, config, limit_bytes) for tokens in range(1, MAX_TOKENS + 1)]
    except ShapeError as error:
        assert "shared memory" in str(error) and "fused_kernel" in error.mend
        return
    for tokens, chosen in enumerate(plans, 1):
        own = values(chosen)
        assert [own[name] for name in ORDER_OF_SUMS] == [values(plans[0])[name] for name in ORDER_OF_SUMS]
        assert 1 <= chosen.max_tokens <= tokens
        assert chosen.smem_bytes <= limit_bytes and 2 <= own["STAGES"] <= MAX_STAGES
        assert chosen.max_pairs == own["MAX_PAIRS"] == chosen.max_tokens * shape.top_k <= max(128, shape.top_k)
        assert chosen.most_first_claim * own["TEAM"] * 32 == chosen.threads == own["WARPS"] * 32


@given(shapes(), st.sampled_from(list(LIMITS.values())), st.sampled_from(["int4", "bf16"]))
@settings(max_examples=200, deadline=None)
def test_automatic_plans_fit_up_to_256_pairs_a_token(shape: ExpertShape, limit_bytes: int, kind: Any) -> None:
    shape = replace(shape, num_experts=min(shape.num_experts, 512), top_k=min(shape.top_k, shape.num_experts, 256, 512))
    chosen = plan(SlotLayout(shape, WeightForm(kind)), MAX_TOKENS, FusedConfig(), limit_bytes)
    assert chosen.smem_bytes <= limit_bytes


@pytest.mark.parametrize("limit_bytes", LIMITS.values(), ids=LIMITS)
def test_every_top_k_up_to_the_number_of_experts_has_a_plan_or_a_message(limit_bytes: int) -> None:
    fits = []
    for top_k in (1, 4, 8, 16, 20, 64, 128, 129, 257, 512, 1024):
        layout = SlotLayout(ExpertShape(1024, top_k, 512, 256), WeightForm("int4"))
        try:
            chosen = plan(layout, MAX_TOKENS, FusedConfig(), limit_bytes)
        except ShapeError as error:
            assert f"for one token of top_k {top_k} among 1024 experts" in str(error)
            continue
        fits.append(top_k)
        assert chosen.max_pairs <= max(128, top_k) and chosen.max_tokens <= max(1, 128 // top_k)
    assert fits[: fits.index(257) + 1] == [1, 4, 8, 16, 20, 64, 128, 129, 257]
    assert limit_bytes != LIMITS["H200"] or fits[-1] == 1024


def test_the_pairs_of_a_launch_are_bounded() -> None:
    """Shared memory holds a row of each; more tokens are computed by more launches."""
    for top_k, most in ((4, 16), (8, 16), (9, 14), (20, 6), (100, 1), (128, 1), (200, 1)):
        layout = SlotLayout(ExpertShape(256, top_k, 512, 256), WeightForm("int4"))
        assert plan(layout, MAX_TOKENS, FusedConfig(), LIMITS["H200"]).max_tokens == most
        few = plan(layout, COLUMNS, FusedConfig(), LIMITS["H200"])
        assert few.max_tokens == min(most, COLUMNS) and values(few)["MAX_TOKENS"] == COLUMNS


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (WeightForm("int4"), (8, 4, 2, 6)),
        (WeightForm("int4", 32), (8, 4, 2, 5)),
        (WeightForm("int8", -1), (8, 4, 2, 3)),
        (WeightForm("bf16"), (8, 4, 2, 3)),
    ],
    ids=str,
)
def test_the_shape_that_was_measured(form: WeightForm, wanted: tuple[int, ...]) -> None:
    """docs/kernels.md: teams of 8 with chunks of 2 units."""
    chosen = plan(SlotLayout(QWEN.shape, form), COLUMNS, FusedConfig(), LIMITS["H200"])
    assert tuple(values(chosen)[name] for name in ("TEAM", "PARTS", "CHUNK", "STAGES")) == wanted
    assert chosen.threads == 512


def test_what_the_caller_fixes_is_taken() -> None:
    config = FusedConfig(block_dim=256, experts_per_block=8, stages=5, k_split=2, team=2)
    own = values(plan(QWEN, COLUMNS, config, LIMITS["H200"]))
    assert [own[name] for name in ("WARPS", "INTERLEAVE", "STAGES", "PARTS", "TEAM")] == [8, 8, 5, 2, 2]
    plain = SlotLayout(QWEN.shape, WeightForm("bf16"))
    assert values(plan(plain, COLUMNS, config, LIMITS["H200"]))["INTERLEAVE"] == 1  # rows are never interleaved
    narrow = SlotLayout(ExpertShape(8, 2, 136, 72), WeightForm("int4"))  # two units of gate and up columns, one of down
    own = values(plan(narrow, COLUMNS, FusedConfig(k_split=32, team=32), LIMITS["H200"]))
    assert (own["TEAM"], own["PARTS"]) == (2, 1)
    own = values(plan(plain, COLUMNS, FusedConfig(stages=16), LIMITS["H200"]))
    assert (own["WARPS"], own["TEAM"]) == (4, 4)  # so many stages leave room for fewer warps, and other sums
    own = values(plan(narrow, COLUMNS, FusedConfig(block_dim=1024), LIMITS["H200"]))
    assert own["TEAM"] == 1  # 16 teams of 2 would need 17 barriers


@pytest.mark.parametrize(
    ("config", "limit_bytes"),
    [
        (FusedConfig(block_dim=512, stages=16), LIMITS["H200"]),
        (FusedConfig(block_dim=1024), LIMITS["99 KiB"]),
        (FusedConfig(stages=16), 24 << 10),
        (FusedConfig(), 4 << 10),
    ],
)
def test_what_does_not_fit_is_refused_with_the_bytes(config: FusedConfig, limit_bytes: int) -> None:
    with pytest.raises(ShapeError, match=f"at most {limit_bytes} bytes of shared memory") as refusal:
        plan(QWEN, COLUMNS, config, limit_bytes)
    assert "block_dim, stages or k_split in fused_kernel" in refusal.value.mend


@pytest.mark.parametrize(
    "field",
    [{"stages": 17}, {"stages": 1}, {"block_dim": 96}, {"team": 3}, {"k_split": 64}, {"experts_per_block": 1025}],
)
def test_configurations_that_cannot_be_are_refused(field: dict[str, int]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(field))}.* in fused_kernel"):
        FusedConfig(**field)


def test_a_block_claims_no_more_than_its_share() -> None:
    chosen = plan(QWEN, COLUMNS, FusedConfig(), LIMITS["H200"])
    assert chosen.most_first_claim == 2 and chosen.tiles_per_token == 4 * 176
    assert [chosen.first_claim(tokens, 132) for tokens in (1, 8)] == [2, 2]
    assert [chosen.first_claim(1, blocks) for blocks in (704, 703, 10_000)] == [1, 2, 1]


CHECK = """
#if SHARED_BYTES != EXPECTED_SHARED_BYTES
#error bytes
#endif
#if TEAM > UNITS1 || PARTS > UNITS2 || (TEAM > 1 && TEAMS > 15)
#error split
#endif
#if WARPS % TEAM || WARPS % PARTS || STAGES >= QUEUE || CHUNK > 31
#error counts
#endif
#if OFF_QUEUE % 8 || OFF_BARRIER % 8 || OFF_NOTE % 16 || OFF_LIST % 8 || OFF_RED % 16
#error places
#endif
"""


class TestSharedMemory:
    """What the launcher asks for is what the source lays out."""

    @given(shapes(), forms, configs, st.sampled_from(list(LIMITS.values())), st.integers(1, MAX_TOKENS))
    @settings(max_examples=150, deadline=None)
    def test_in_every_plan(
        self, shape: ExpertShape, form: WeightForm, config: FusedConfig, limit_bytes: int, tokens: int
    ) -> None:
        try:
            chosen = plan(SlotLayout(shape, form), tokens, config, limit_bytes)
        except ShapeError:
            return
        assert preprocessed(CHECK, chosen.source) == ""

    def test_the_conditions_see_what_is_wrong(self) -> None:
        source = plan(QWEN, COLUMNS, FusedConfig(), LIMITS["H200"]).source
        for name, value, seen in (("EXPECTED_SHARED_BYTES", 5, "bytes"), ("TEAM", 32, "split"), ("PARTS", 3, "counts")):
            assert seen in preprocessed(
                CHECK, Source(source.name, tuple((dict(source.defines) | {name: value}).items()))
            )

    @pytest.mark.usefixtures("nvrtc")
    def test_the_source_refuses_another_number(self) -> None:
        source = plan(QWEN, COLUMNS, FusedConfig(), LIMITS["H200"]).source
        wrong = tuple((dict(source.defines) | {"EXPECTED_SHARED_BYTES": 231668}).items())
        with pytest.raises(KernelError, match="the launcher counts other bytes of shared memory"):
            compile_cubin(Source(source.name, wrong), "sm_80")


def test_the_catalog_has_what_runs_of_known_models_load() -> None:
    """The compile tests see the very source that FusedExperts loads."""
    sources = {entry.source for entry in CATALOG}
    for tokens, gpu in itertools.product((COLUMNS, MAX_TOKENS), (H200, A100)):
        assert choose(QWEN, tokens, FusedConfig(), gpu).source in sources
