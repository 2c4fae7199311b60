"""Metric sinks: passes a run's metrics on to TensorBoard, Weights & Biases, MLflow and trackio."""
