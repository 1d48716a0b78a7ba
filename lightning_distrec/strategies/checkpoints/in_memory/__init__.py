"""Copies in the memory of nodes, from which a restarted fit goes on."""
