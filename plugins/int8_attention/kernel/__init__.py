"""The CUDA kernels of speceyes::Int8KVAttention, and their arithmetic on the host."""
