"""This machine as the kernel and NVML show it: processes, network interfaces, GPUs."""
