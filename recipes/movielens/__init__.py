"""MovieLens-100k as the recipes movielens_dlrm, two_tower, sasrec and hstu read it."""
