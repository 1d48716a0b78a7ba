"""What watches a run: callbacks that measure ranks, bench, and doctor."""
