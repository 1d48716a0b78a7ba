"""Tables and topology in, a plan out; nothing here knows of sharded modules."""
