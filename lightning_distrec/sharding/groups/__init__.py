"""Tables that are sharded within groups of ranks: the groups, and how their replicas are kept equal."""
