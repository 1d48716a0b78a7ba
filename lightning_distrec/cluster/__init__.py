"""Who am I among the ranks, and what have the ranks agreed on."""
