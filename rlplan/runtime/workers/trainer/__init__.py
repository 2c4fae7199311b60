"""Trainer ranks on DeepSpeed: policy, value model and reward model."""
