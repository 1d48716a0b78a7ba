"""Where the inputs of tables come from in a batch, and whether a step calls with what was prefetched."""
