"""The device layer: CUDA and NVML behind one interface, and a stand-in for them in the host's memory."""
