"""The version, alone in its file: ``gpujobs --version`` reads nothing else."""

__version__ = "0.1.0"
