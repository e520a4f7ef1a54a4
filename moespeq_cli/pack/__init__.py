"""The pack stage: every expert as one aligned record, striped over shards."""
