"""Predicts clicks on advertisements: DLRM and DCNv2 as in MLPerf, or DeepFM, on Criteo's logs or on
generated ones."""
