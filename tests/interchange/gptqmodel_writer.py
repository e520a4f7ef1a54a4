"""Run by a Python that has GPTQModel: quantise models with it.

    python gptqmodel_writer.py RESULT_FOLDER plain|dynamic|desc_act NAME=MODEL ...

Writes RESULT_FOLDER/NAME. It quantises attention and shared experts too, but for `dynamic`, where rules leave these as
they are and give the experts of layer 1 eight bits; `desc_act` orders the channels by activation.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its default fails on two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "desc_act": {"desc_act": True, "act_group_aware": False},
    "dynamic": {
        "dynamic": {
            "-:.*self_attn.*": {},
            "-:.*shared_expert.*": {},
            r"+:.*layers\.1\.mlp\.experts\..*": {"bits": 8, "group_size": 64},
        }
    },
}
TEXT = "The ferry left the quay a little after six, and nobody on deck spoke of it."


def main() -> None:
    """Quantise each model at 4 bits in groups of 32."""
    from gptqmodel import GPTQModel, QuantizeConfig

    target, form = sys.argv[1:3]
    for argument in sys.argv[3:]:
        name, folder = argument.split("=", 1)
        model = GPTQModel.load(folder, QuantizeConfig(bits=4, group_size=32, **FORMS[form]))
        model.quantize([TEXT] * 4, batch_size=1)
        model.save(f"{target}/{name}")


if __name__ == "__main__":
    main()
