"""Trainer ranks on DeepSpeed: the policy's and the value model's."""
