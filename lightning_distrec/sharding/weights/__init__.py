"""The weights that a module shows of sharded tables, and what may be done with them."""
