"""GPU kernels and compilation: attention, group norm, upsampling, CUDA graphs."""
