"""How batches reach the step."""
