"""The probes of `bench kernels` pass what is right and catch what is wrong; no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench.kernel_bound import Rounding, answers
from moespeq_cli.bench.kernel_check import FEW, Checker, integers, one_hot_h, one_hot_x, probes, random_batch
from moespeq_cli.bench.kernel_data import random_experts
from runtime.errors import KernelError
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from runtime.kernels.units import Codes
from tests.bench.simulated import Fault, Simulated

SHAPE = ExpertShape(7, 3, 136, 200)  # wider than long, no multiple of a unit
FORMS = [
    WeightForm("int4", 32),
    WeightForm("int4", 128),
    WeightForm("int4", -1),
    WeightForm("int8", -1),
    WeightForm("bf16"),
]
FORM_NAMES = [f"{form.kind}-{form.group_size}" for form in FORMS]


def check(shape: ExpertShape, form: WeightForm, candidate: Simulated) -> list[dict[str, object]]:
    return Checker(shape, form, [candidate], "cpu").run()


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_right_kernel_passes_every_probe(form: WeightForm) -> None:
    records = check(SHAPE, form, Simulated(Fault()))
    assert all(record["ok"] for record in records)
    names = {str(record["check"]) for record in records}
    assert names == {
        "one-hot x", "one-hot h", "integers", "random", "random, one set of experts", "same bits in three repeats",
        "row invariance in random orders", "experts that are not here", "two passes as one",
    }  # fmt: skip
    counts = {record["tokens"] for record in records if record["check"] == "random"}
    assert counts == {*FEW, 33, 100}
    shares = {
        name: min(float(r["exact_share"]) for r in records if r["check"] == name)  # type: ignore[arg-type]
        for name in ("one-hot x", "one-hot h", "integers", "random")
    }
    assert shares["integers"] == 1.0, "every element has one right answer"
    assert shares["one-hot h"] >= 0.99 and shares["one-hot x"] >= 0.99 and shares["random"] > 0.25, shares


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_activation_passes(activation: Activation, has_bias: bool) -> None:
    shape = ExpertShape(5, 2, 144, 88, activation, has_bias)
    assert all(record["ok"] for record in check(shape, WeightForm("int4", 64), Simulated(Fault(), most=17)))


@pytest.mark.parametrize("sizes", [(1, 1, 8, 8), (3, 3, 264, 24), (257, 2, 32, 40), (2, 2, 64, 2400)])
def test_odd_layers_pass(sizes: tuple[int, int, int, int]) -> None:
    records = check(ExpertShape(*sizes), WeightForm("int4", 32), Simulated(Fault(), most=17))
    assert all(record["ok"] for record in records)
    exact = [float(r["exact_share"]) for r in records if r["check"] == "integers"]  # type: ignore[arg-type]
    assert min(exact) == 1.0


@pytest.mark.parametrize(
    "rounding", [Rounding(weights=True), Rounding(weights=True, products=True)], ids=["weights", "products too"]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_backends_that_round_more_are_followed_there(rounding: Rounding, has_bias: bool) -> None:
    shape, form = ExpertShape(7, 3, 136, 200, has_bias=has_bias), WeightForm("int4", 32)
    candidate = Simulated(Fault(), "grouped", rounding, row_invariant=False)
    records = check(shape, form, candidate)
    assert all(record["ok"] for record in records)
    widest = {
        name: max(int(r["allowed_numbers"]) for r in records if r["check"] == name)  # type: ignore[call-overload]
        for name in ("one-hot x", "one-hot h", "integers", "random")
    }
    assert widest["one-hot x"] == widest["one-hot h"] == widest["integers"] == 1 and widest["random"] <= 5, widest
    with pytest.raises(KernelError):
        check(shape, form, _pretending(candidate))


def _pretending(candidate: Simulated) -> Simulated:
    """Rounds more than it says."""

    class Pretender(Simulated):
        def prepare(self, shape: ExpertShape, form: WeightForm, max_tokens: int):  # type: ignore[no-untyped-def]
            return candidate.prepare(shape, form, max_tokens)

    return Pretender(Fault())


class DeadElement(Fault):
    name = "one output never computed"

    def y(self, y: Tensor, call: int) -> Tensor:
        y[-1, 77] = 0
        return y


class Unwritten(Fault):
    name = "one output never written"

    def y(self, y: Tensor, call: int) -> Tensor:
        y[0, 3] = torch.nan
        return y


class DeadInner(Fault):
    name = "one element of h lost"

    def h(self, h: Tensor) -> Tensor:
        h[:, -1] = 0
        return h


class LastColumn(Fault):
    name = "the last column of gate and up not read"

    def linear(self, name: str, linear: Codes | Tensor) -> Codes | Tensor:
        if name == "gate_up" and isinstance(linear, Codes):
            linear.codes[..., -1] = 8
        return linear


class Nibbles(Fault):
    name = "two neighbouring codes swapped in one row"

    def linear(self, name: str, linear: Codes | Tensor) -> Codes | Tensor:
        if isinstance(linear, Codes):
            linear.codes[:, 5, 10:12] = linear.codes[:, 5, 10:12].flip(-1)
        return linear


class Scales(Fault):
    name = "two scales of one row swapped"

    def linear(self, name: str, linear: Codes | Tensor) -> Codes | Tensor:
        if isinstance(linear, Codes):
            linear.scales[:, 9, :2] = linear.scales[:, 9, :2].flip(-1)
        return linear


class GateForUp(Fault):
    name = "gate and up exchanged"

    def linear(self, name: str, linear: Codes | Tensor) -> Codes | Tensor:
        if name == "gate_up" and isinstance(linear, Codes):
            return Codes(linear.codes.roll(100 * 2, 1), linear.scales.roll(100 * 2, 1))
        return linear


class LastChoice(Fault):
    name = "the last expert of a token left out"

    def p(self, p: Tensor, slot_of: Tensor) -> Tensor:
        p[:, -1] = 0
        return p


class NotThere(Fault):
    name = "an expert without a slot read from slot 0"

    def p(self, p: Tensor, slot_of: Tensor) -> Tensor:
        return p + (slot_of < 0).any() * 0.05


class RoundedH(Fault):
    name = "h rounded down instead of to nearest"

    def h(self, h: Tensor) -> Tensor:
        bits = h.view(torch.int16)
        return (bits - (torch.arange(h.shape[1]) % 2).to(torch.int16)).view(torch.bfloat16)


class Racing(Fault):
    name = "another answer now and then"

    def y(self, y: Tensor, call: int) -> Tensor:
        if call % 2:
            y[0, 0] = torch.nextafter(y[0, 0], torch.tensor(9.0, dtype=y.dtype))
        return y


class Batchy(Fault):
    name = "bits that depend on the batch"

    def y(self, y: Tensor, call: int) -> Tensor:
        if len(y) == 5:
            y[0, 0] = torch.nextafter(y[0, 0], torch.tensor(9.0, dtype=y.dtype))
        return y


FAULTS = [
    DeadElement(), Unwritten(), DeadInner(), LastColumn(), Nibbles(), Scales(), GateForUp(), LastChoice(), NotThere(),
    RoundedH(), Racing(), Batchy(),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_planted_fault_is_caught_and_named(fault: Fault) -> None:
    with pytest.raises(KernelError, match=r"fused to pass '.*' at \d+ tokens \(int4, 7 experts, top-3, 136 x 200\)"):
        check(SHAPE, WeightForm("int4", 64), Simulated(fault))


@pytest.mark.parametrize("fault", [Nibbles(), Scales(), LastColumn()], ids=["nibbles", "scales", "last column"])
def test_each_probe_sees_it_by_itself(fault: Fault) -> None:
    """A probe that only passes because another one looks is no probe."""
    form, generator = WeightForm("int4", 64), torch.Generator().manual_seed(1)
    for probe in probes(SHAPE, form, 257, generator):
        checker = Checker(SHAPE, form, [Simulated(fault, most=257)], "cpu", seed=2)
        with pytest.raises(KernelError):
            checker._probe(probe)


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_one_hot_tokens_show_columns_of_weights(form: WeightForm) -> None:
    """The interval is a fact about weights, by another way than the formula."""
    generator = torch.Generator().manual_seed(3)
    probe = one_hot_h(SHAPE, form, 9, generator)
    right = answers(
        probe.experts, probe.batch.x, probe.batch.top_k_index, probe.batch.top_k_weights, Rounding(), "single"
    )
    for token in range(9):
        expert = int(probe.batch.top_k_index[token, token % 3])
        down = probe.experts.weight("down", expert)
        assert any(torch.equal(right.reference[token], column) for column in down.T)
    probe = one_hot_x(SHAPE, form, 9, generator)
    right = answers(
        probe.experts, probe.batch.x, probe.batch.top_k_index, probe.batch.top_k_weights, Rounding(), "single"
    )
    assert bool((right.reference.abs().sum(1) > 0).all())


def test_integer_probe_is_exact_for_real_sizes() -> None:
    shape = ExpertShape(2, 2, 512, 3000)
    probe = integers(shape, WeightForm("int4", 128), 5, torch.Generator().manual_seed(0))
    right = answers(
        probe.experts, probe.batch.x, probe.batch.top_k_index, probe.batch.top_k_weights, Rounding(), "integer"
    )
    assert right.exact_share == 1.0 and torch.equal(right.reference, (2 * right.reference).round() / 2)


def test_interval_counts_the_worst_element_and_nan() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = random_experts(SHAPE, FORMS[0], generator)
    batch = random_batch(SHAPE, 4, generator)
    right = answers(experts, batch.x, batch.top_k_index, batch.top_k_weights, Rounding(), "float")
    y = right.reference.bfloat16()
    assert right.wrong(y) is None and right.wrong(right.low) is None and right.wrong(right.high) is None
    y[2, 7] = torch.nan
    assert "1 of 544 elements outside; worst at token 2, column 7: nan" in str(right.wrong(y))
    assert "544 of 544" in str(right.wrong(torch.full_like(y, torch.nan)))
    assert right.rows(slice(0, 2)).wrong(y[:2]) is None


def test_expert_without_tokens_is_left_out() -> None:
    batch = random_batch(SHAPE, 50, torch.Generator().manual_seed(0), skip=4)
    assert 4 not in batch.top_k_index and len(torch.unique(batch.top_k_index)) == 6
    same = random_batch(SHAPE, 50, torch.Generator().manual_seed(0), same=True)
    assert len(torch.unique(same.top_k_index)) == 3


@pytest.mark.parametrize("form", [WeightForm("int4", 128), WeightForm("bf16")], ids=["int4", "bf16"])
def test_interval_of_a_real_layer_is_a_few_numbers_wide(form: WeightForm) -> None:
    shape, generator = ExpertShape(2, 2, 2048, 1408), torch.Generator().manual_seed(0)
    experts, batch = random_experts(shape, form, generator), random_batch(shape, 1, generator)
    right = answers(experts, batch.x, batch.top_k_index, batch.top_k_weights, Rounding(), "float")
    assert right.allowed <= 2
    short = batch.x.clone()
    short[:, 2047] = 0
    wrong = answers(experts, short, batch.top_k_index, batch.top_k_weights, Rounding(), "float")
    assert right.wrong(wrong.reference.bfloat16()) is not None, "one of 2048 columns left out"
