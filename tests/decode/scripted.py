"""A Mixtral whose greedy text is any chain of tokens that one likes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.artifacts.pack import Pack
from tests.decode.packs import pack_model
from tests.tiny import VOCAB, make_model

HIDDEN = 288  # more than the vocabulary: each token has a direction of its own


def save_scripted(folder: Path, chain: Mapping[int, int], **overrides: Any) -> Pack:
    """Pack a model in which token t is followed by `chain[t]`.

    Embeddings are one-hot, attention and experts add nothing, and the head looks the next token up.
    """
    model = make_model("mixtral", hidden_size=HIDDEN, **overrides)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB, HIDDEN))
        model.lm_head.weight.zero_()
        for token, following in chain.items():
            model.lm_head.weight[following, token] = 10
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                parameter.zero_()
    return pack_model(model, folder)
