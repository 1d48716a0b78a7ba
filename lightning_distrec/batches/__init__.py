"""What is in a batch, whatever containers it is made of, and what each rank reports of its batches."""
