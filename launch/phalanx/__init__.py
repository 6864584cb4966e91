"""phalanx: from one device to many GPUs and many nodes with PyTorch."""

__all__ = ["__version__"]

__version__ = "0.1.0"
