"""How often this program and transformers, both in BF16, say the same next token; float32 is the test's, not this.

    python -m tests.families.agreement --json docs/benchmarks/families.json

For each family a tiny random BF16 model, and the embedded trained one: prompts of 24 tokens continued greedily by
transformers (its default experts implementation), and at each of these positions the likeliest token of both, given
the same tokens before it. Also how far the logits lie apart, over their spread, and whether the whole texts are equal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from moespeq_cli.demo import checkpoint_path
from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.engine import Engine
from runtime.run_plan import plan_run
from tests.decode.packs import CONTEXT, build, decode, prompt_of
from tests.pack.fixtures import make_pack, save_quantized
from tests.tiny import KINDS, MORE, UNLISTED

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 24, 32


@torch.no_grad()
def agreement(pack: Pack, model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Compare a pack's target with transformers' model of the same folder."""
    from transformers import AutoModelForCausalLM

    library = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    same = positions = texts = 0
    apart: list[float] = []
    settings = RunSettings(context=CONTEXT, speculate=False)
    with Engine(pack, settings, plan_run(pack, settings)) as engine:
        for prompt in prompts:
            whole = library.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0].tolist()
            theirs = library(torch.tensor([whole])).logits[0].float()
            engine.host.start(len(whole))
            engine.prefill(whole[: len(prompt) - 1])
            for position in range(len(prompt) - 1, len(whole) - 1):
                ours = engine.rows([whole[position]], position)[0][0]
                same += int(ours.argmax() == theirs[position].argmax())
                positions += 1
                apart.append(float((ours - theirs[position]).norm() / theirs[position].norm()))
            texts += decode(pack, prompt, NEW_TOKENS, speculate=False).tokens == whole[len(prompt) :]
    return {
        "same_next_token": same / positions,
        "positions": positions,
        "mean_logit_difference": sum(apart) / len(apart),
        "equal_texts": f"{texts} of {len(prompts)}",
    }


def main() -> None:
    """Measure every family and the embedded model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    random_prompts = [prompt_of(PROMPT_TOKENS, seed=seed) for seed in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        for kind in (*KINDS, *MORE, *UNLISTED):
            pack = build(Path(folder) / kind, kind, torch.bfloat16)
            found[kind] = agreement(pack, pack.folder.parent / "model", random_prompts)
            print(kind, json.dumps(found[kind]), flush=True)
        source = checkpoint_path()
        pack = make_pack(source, save_quantized(source, Path(folder) / "quantized"), Path(folder) / "pack")
        found["embedded model"] = agreement(pack, source, _texts(source))
        print("embedded model", json.dumps(found["embedded model"]))
    body = {"command": "python -m tests.families.agreement --json FILE", "torch": torch.__version__, "families": found}
    arguments.json.write_text(json.dumps(body, indent=1) + "\n")


def _texts(source: Path) -> list[list[int]]:
    from moespeq_cli.quantize.calibrate import read_texts
    from runtime.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    _, texts = read_texts(None, tokenizer, 3 * PROMPTS)
    ids = [tokenizer(text.text, add_special_tokens=not text.formatted)["input_ids"] for text in texts]
    return [tokens[:PROMPT_TOKENS] for tokens in ids if len(tokens) > PROMPT_TOKENS][:PROMPTS]


if __name__ == "__main__":
    main()
