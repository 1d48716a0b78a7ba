"""Who updates which parameter, and when."""
