"""Expert bytes on disk and in memory: records, slots, cache, prefetch, and the plan of what goes where."""
