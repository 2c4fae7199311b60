"""What a training rank keeps and reaches: ZeRO and other trainers, optimizers, peaks, checkpoints, offload."""
