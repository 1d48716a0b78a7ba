"""MovieLens-100k as the recipes movielens_dlrm, two_tower and sasrec read it."""
