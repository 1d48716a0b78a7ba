"""What looks at checkpoints, or converts them, outside of any run."""
