"""Operations on whole checkpoints: convert, average, diff, verify, summarize. Reads and writes through `formats`."""
