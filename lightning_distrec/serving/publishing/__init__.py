"""What a training job publishes for servers that follow it."""
