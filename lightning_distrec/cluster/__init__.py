"""The ranks of a job: which launcher started them, how they meet, decide together and end."""
