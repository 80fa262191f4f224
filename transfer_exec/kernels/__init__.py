"""The loops that move elements between tensors and buffers."""
