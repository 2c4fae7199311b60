"""The device layer: CUDA and NVML behind one interface."""
