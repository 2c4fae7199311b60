"""Memory of a training rank: ZeRO and other trainers, optimizers, peaks, checkpoints, offload."""
