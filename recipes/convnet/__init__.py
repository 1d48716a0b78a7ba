"""Classifies small generated pictures: ResNet-18, the classic data-parallel tutorial with our
strategies."""
