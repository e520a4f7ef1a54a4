"""The benchmark of the draft's linears times what it says it times."""

from __future__ import annotations

from moespeq_cli.bench.linear import measure, table


def test_every_shape_has_its_three_times() -> None:
    rows = measure([(16, 128), (32, 256)], 1, lambda: None)
    assert [(row["out_features"], row["in_features"]) for row in rows] == [(16, 128), (32, 256)]
    for row in rows:
        for name in ("int4_us", "bf16_us", "codes_us"):
            assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"]
    assert table(rows).count("\n") == 3
