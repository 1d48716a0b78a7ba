"""The short path of lookups: what is sent, without the Python of torchrec's exchanges."""
