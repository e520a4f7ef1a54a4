"""How large each branch of a built model is: the correlation of neighbouring tokens followed through the layers.

Write `h[t]` for the residual stream, a vector whose entries are about independent. All that routing needs to know
about a text is the covariance by lag, `K(d) = mean of h[t] . h[t + d] / hidden_size`:

* the embedding gives K(0) = 1 and nothing at other lags;
* attention with weights `w(a)` on the token `a` places back turns a correlation `C = K / K(0)` into
  `A(d) = sum over a, b of w(a) w(b) C(d + a - b)`;
* a gated feed-forward part with random weights turns a correlation `c` into `c (0.12 + 0.70 c + 0.18 c^2)` (the
  terms of SiLU's Hermite series times the linear up projection); of routed experts only the common ones count.

A router of orthogonal rows sees Gaussian scores that correlate by C(1) between neighbours, and so C(1) alone decides
how many of their top k are the same. It is chosen for 25 % of them (or 2 % above chance where chance gives that
already), and attention is made as large in each layer as keeps it there.

The draft's error is followed the same way, as energy `e` beside K(0). An INT4 expert is wrong by 18 % of its output
(three linears of 10 % each, the rounding error of Gaussian weights in groups of 128), experts pass an error on with
twice its energy, and each expert chosen otherwise adds its own output and the other's. Routed experts are made as large
as leaves 95.5 % of the choices alike, mean of the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moespeq_cli.bench.synthetic.architecture import Architecture

SHARED_EXPERTS_OF_NEIGHBOURS = 0.25
ABOVE_CHANCE = 0.02
EXPERTS_ALIKE = 0.955
MOST_ROUTED_ENERGY = 1.0  # of the embedding's, added by routed experts over all layers
SHARED_ENERGY = 0.3  # the same of shared experts
DENSE_ENERGY = 0.1  # of a dense layer
LEAST_ATTENTION = 0.05  # the same of attention over all layers, even where nothing is to be added
ROUTER_SPREAD = 1.5  # standard deviation of the router's scores
ANCHOR = 3.0  # the constant that two channels hold, in units of the embedding's standard deviation
CONTENT = 0.4  # standard deviation of the parts of queries and keys that depend on the token
INT4_ERROR = 0.18  # of an expert's output, root mean square
PASSED_ON = 2.06  # energy of an error behind a gated part over that before it
GATED_RMS = 0.596  # of silu(g) * u, g and u standard normal
SIGMOID_RMS = 0.541  # of sigmoid(g)
STRENGTH = 16.0  # the positional score at distance 0 over that of far tokens
BAND = (0.004, 0.25)  # radians a token of the rotary pairs that carry it
LAGS = 96
SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Root mean squares in one layer, a channel each.

    Attributes:
        before_attention, before_experts: of the whole stream, anchors included: what a norm divides by.
        live_attention, live_experts: of the other channels once divided.
        attention, routed, shared: what each branch adds; `shared` is a dense layer's too.
        attended: of the weighted mean of values whose own is 1.
    """

    before_attention: float
    before_experts: float
    live_attention: float
    live_experts: float
    attention: float
    routed: float
    shared: float
    attended: float


@dataclass(frozen=True, slots=True)
class Scales:
    """All layers', and what is left of the embedding at the end.

    Attributes:
        layers: by layer.
        final: root mean square of the stream before the last norm.
        routing_weights: root of the mean sum of squares of a token's routing weights.
        correlation: of the router's inputs of neighbours that was aimed at.
    """

    layers: tuple[LayerScales, ...]
    final: float
    routing_weights: float
    correlation: float


def plan_scales(architecture: Architecture) -> Scales:
    """Size every branch; nothing in it depends on a seed."""
    return _Plan(architecture).solve()


class _Plan:
    """The recursion, repeated until the draft's routing is as alike as wanted."""

    def __init__(self, architecture: Architecture) -> None:
        count, top_k = architecture.num_experts, architecture.top_k
        self.architecture = architecture
        self.curve = overlap_curve(count, top_k)
        wanted = max(SHARED_EXPERTS_OF_NEIGHBOURS, top_k / count + ABOVE_CHANCE)
        self.correlation = float(torch.searchsorted(self.curve, wanted)) / (len(self.curve) - 1)
        self.weights = local_weights(rotary_frequencies(architecture))
        self.key_spread = math.exp(CONTENT**2 * STRENGTH * score_scale(architecture))
        self.routing, marginal = routing_weights(architecture)
        self.lost = lost_by_noise(count, top_k)
        self.swapped = 2 * top_k * marginal / self.routing

    def solve(self) -> Scales:
        low, high = 0.0, MOST_ROUTED_ENERGY
        scales, alike = self.follow(high)
        if alike < EXPERTS_ALIKE:
            for _ in range(20):
                middle = (low + high) / 2
                scales, alike = self.follow(middle)
                low, high = (middle, high) if alike > EXPERTS_ALIKE else (low, middle)
        return scales

    def follow(self, routed_energy: float) -> tuple[Scales, float]:
        """All scales, and the mean share of experts that the draft chooses alike."""
        architecture = self.architecture
        moe_layers = architecture.num_layers - architecture.first_moe_layer
        covariance = torch.zeros(LAGS, dtype=torch.float64)
        covariance[0] = 1.0
        error, alike = 0.0, []
        layers = []
        for layer_id in range(architecture.num_layers):
            dense = layer_id < architecture.first_moe_layer
            routed = 0.0 if dense else routed_energy / moe_layers
            shared = DENSE_ENERGY if dense else SHARED_ENERGY / moe_layers if architecture.shared_size else 0.0
            start = float(covariance[0])
            attended = _attended(covariance / start, self.weights, self.key_spread)
            energy = float(attended[0])
            attended = attended / energy
            added = (self.correlation * start - float(covariance[1])) / (float(attended[1]) - self.correlation)
            added = max(added, LEAST_ATTENTION / architecture.num_layers)
            covariance = covariance + added * attended
            middle = float(covariance[0])
            error += added * error / start
            noise = error / middle
            lost = 0.0 if dense else self.lost * math.sqrt(noise)
            error += (routed + shared) * PASSED_ON * noise + routed * (INT4_ERROR**2 + self.swapped * lost)
            alike += [] if dense else [1 - lost]
            correlation = (covariance / middle).clamp(0, 1)
            common = self.curve[(correlation * (len(self.curve) - 1)).long()]
            covariance = covariance + (shared + routed * common) * _gated(correlation)
            rms = [_rms(architecture, value) for value in (start, middle)]
            live = [math.sqrt(value) / whole for value, whole in zip((start, middle), rms, strict=True)]
            layers.append(LayerScales(*rms, *live, *(math.sqrt(value) for value in (added, routed, shared, energy))))
        final = _rms(architecture, float(covariance[0]))
        scales = Scales(tuple(layers), final, math.sqrt(self.routing), self.correlation)
        return scales, sum(alike) / len(alike)


def overlap_curve(num_experts: int, top_k: int, points: int = 200) -> Tensor:
    """Share of the top k that two rows of Gaussian scores have in common, by correlation: float64 [points + 1]."""
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, SAMPLES, num_experts, generator=generator)
    chosen = torch.zeros(SAMPLES, num_experts).scatter_(1, one.topk(top_k).indices, 1.0)
    grid = torch.linspace(0, 1, 21, dtype=torch.float64)
    shares = []
    for value in grid.tolist():
        near = value * one + math.sqrt(1 - value * value) * other
        shares.append(float(chosen.gather(1, near.topk(top_k).indices).mean()))
    place = torch.linspace(0, 20, points + 1, dtype=torch.float64)
    left = place.long().clamp(max=19)
    known = torch.tensor(shares, dtype=torch.float64)
    return known[left] + (place - left) * (known[left + 1] - known[left])


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """Radians a token of each rotary pair, float64 [rope_size / 2]; the library's where they are not the plain ones."""
    parameters = architecture.config.rope_parameters
    if parameters["rope_type"] == "default":
        pairs = torch.arange(0, architecture.rope_size, 2, dtype=torch.float64) / architecture.rope_size
        return float(parameters["rope_theta"]) ** -pairs
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](architecture.config)
    return torch.as_tensor(frequencies).double().cpu()


def positional_pairs(frequencies: Tensor) -> Tensor:
    """Which pairs carry the positional score, bool [pairs]: those in `BAND`, or the one that is nearest to it."""
    inside = (frequencies >= BAND[0]) & (frequencies <= BAND[1])
    if not inside.any():
        inside[(frequencies.log() - math.log(BAND[1])).abs().argmin()] = True
    return inside


def local_weights(frequencies: Tensor) -> Tensor:
    """Attention to the token so many places back, float64 [LAGS], sum 1."""
    chosen = frequencies[positional_pairs(frequencies)]
    scores = torch.cos(torch.arange(LAGS, dtype=torch.float64)[:, None] * chosen).mean(1)
    return torch.softmax(STRENGTH * scores, 0)


def lost_by_noise(num_experts: int, top_k: int) -> float:
    """Share of the top k of Gaussian scores that noise of standard deviation `s` replaces, over `s`, for small `s`."""
    generator = torch.Generator().manual_seed(1)
    scores, noise = torch.randn(2, SAMPLES, num_experts, generator=generator)
    chosen = torch.zeros(SAMPLES, num_experts).scatter_(1, scores.topk(top_k).indices, 1.0)
    kept = chosen.gather(1, (scores + 0.1 * noise).topk(top_k).indices).mean()
    return 10 * (1 - float(kept))


def routing_weights(architecture: Architecture) -> tuple[float, float]:
    """Mean sum of squares of a token's routing weights, and the mean square of the smallest, on Gaussian scores."""
    if architecture.model_type == "phimoe":
        return 2.0, 1.0  # its router compares each winner with scores near it only: mostly both weights are 1
    generator = torch.Generator().manual_seed(0)
    scores = ROUTER_SPREAD * torch.randn(SAMPLES, architecture.num_experts, generator=generator)
    weights = scores.softmax(-1).topk(architecture.top_k).values
    if architecture.model_type == "mixtral":
        weights = weights / weights.sum(-1, keepdim=True)
    squares = weights.square().mean(0)
    return float(squares.sum()), float(squares[-1])


def score_scale(architecture: Architecture) -> float:
    """What the library multiplies `q . k` by."""
    if not architecture.is_latent:
        return float(architecture.value_size**-0.5)
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import yarn_apply_mscale

    size = architecture.config.qk_nope_head_dim + architecture.rope_size
    return float(yarn_apply_mscale(architecture.config.rope_parameters, size**-0.5))


def _attended(correlation: Tensor, weights: Tensor, key_spread: float) -> Tensor:
    """Covariance by lag of weighted means over earlier tokens.

    What depends on a token in its key makes its weight log-normal, the same for all that attend to it: its share in
    the covariance grows by `key_spread`.
    """
    correlation = correlation.clone()
    correlation[0] *= key_spread
    wide = torch.cat([correlation.flip(0)[:-1], correlation])  # lags 1 - LAGS to LAGS - 1
    kernel = torch.nn.functional.conv1d(
        torch.nn.functional.pad(weights, (LAGS - 1, LAGS - 1))[None, None], weights[None, None]
    )[0, 0]  # autocorrelation of the weights, the same lags
    full = torch.nn.functional.conv1d(
        torch.nn.functional.pad(wide, (LAGS - 1, LAGS - 1))[None, None], kernel.flip(0)[None, None]
    )[0, 0]
    return full[LAGS - 1 :]


def _gated(correlation: Tensor) -> Tensor:
    return correlation * (0.12 + 0.70 * correlation + 0.18 * correlation**2)


def _rms(architecture: Architecture, live_energy: float) -> float:
    anchors = 2 * ANCHOR**2
    return math.sqrt(((architecture.hidden_size - 2) * live_energy + anchors) / architecture.hidden_size)
