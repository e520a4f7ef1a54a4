"""What the stages leave on disk for each other: schemas, readers and writers."""
